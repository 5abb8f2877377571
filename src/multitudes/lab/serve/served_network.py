"""A network that answers batches of requests, deployed if possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multitudes.deployment.deploy import deploy
from multitudes.ensemble.predictor import Predictor
from multitudes.evaluation.calibrate import Calibrated
from multitudes.lab.serve.held_out import held_out
from multitudes.lab.serve.json_answers import answer_rows
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.spec.assignment import precision_on
from multitudes.networks.calls import evaluating
from multitudes.networks.stochastic import stochastic_layers
from multitudes.networks.verification import rows_interact
from multitudes.tasks.predictive import Predictive

EXAMPLE = 8
"""Number of test inputs on which the deployed network is verified."""

Answers = list[dict[str, Any]]
"""One answer per row of a request."""


class Question(NamedTuple):
    """Inputs `[n, ...]` like those of the network's data, and the level of their sets or intervals."""

    x: Tensor
    level: float


class ServedNetwork:
    """A trained network, deployed if possible, with conformal scores for its classes.

    Answers are those of `multitudes predict`. Sets of classes have the requested coverage, based on scores of the test
    part. `draws` overrides the number of draws of the job.
    """

    def __init__(
        self, trained: Trained, *, draws: int | None = None, seed: int = 0, precision: str | None = None
    ) -> None:
        self.trained, self.data, self.seed = trained, trained.data, seed
        self._precision: str | None = precision_on(precision, trained.device)
        self._quick: Predictor | None = None
        self.held_out = held_out(trained, draws is not None, seed, self._precision)
        self.conformal = self.held_out.conformal(self.data.test.y)
        own = trained.net.calibration.conformal if isinstance(trained.net, Calibrated) else None
        self.has_conformal = own is not None or self.conformal is not None
        example = self.data.test.x[:EXAMPLE]
        example = torch.cat([example, example]) if len(example) == 1 else example
        self.draws = bool(stochastic_layers(trained.multitude.network))
        self.batchable = not self.draws and self._rows_independent(example)
        self.description = self._deploy(example)
        self.members = self.predict(example).members  # warm up: the first batch tries several ways to run

    def predict(self, x: Tensor) -> Predictive:
        """Predict inputs `[N, ...]`."""
        seed = self.seed if self.draws else None
        return self.trained.predict(x, seed=seed, precision=self._precision, progress=False, by=self._quick)

    def answer(self, questions: Sequence[Question]) -> list[Answers]:
        """Answer each question; those that may share a batch are predicted together."""
        if not self.batchable:
            return [self._rows(self.predict(each.x), each.level) for each in questions]
        whole = self.predict(torch.cat([each.x for each in questions]))
        by_level = {level: self._rows(whole, level) for level in {each.level for each in questions}}
        answers, start = [], 0
        for each in questions:
            answers.append(by_level[each.level][start : start + len(each.x)])
            start += len(each.x)
        return answers

    def _rows(self, answer: Predictive, level: float) -> Answers:
        return answer_rows(answer, self.data, level, self.conformal)

    # -- how it runs ---------------------------------------------------------------------------------------

    def _rows_independent(self, example: Tensor) -> bool:
        """Return whether predictions of rows are independent, so that requests may share a batch."""
        net = self.trained.multitude
        with evaluating(net), torch.no_grad():
            return not rows_interact(net.network, net._predictions, self._preprocess(example))

    def _deploy(self, example: Tensor) -> str:
        """Deploy the network unless it is stochastic, and describe how it runs."""
        if self.draws:
            return "with torch, one request at a time, since the network draws"
        try:
            deployed = deploy(self.trained.net, self._preprocess(example), precision=self._precision)
        except (ValueError, ImportError) as error:
            return f"with torch, since it cannot be deployed: {error}"
        self._quick, self._precision = deployed, None
        return deployed.summary()

    def _preprocess(self, x: Tensor) -> Tensor:
        return self.data.normalised(x.to(self.trained.device))
