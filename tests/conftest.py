"""Which cases of a test belong to the quick suite, where each of many takes seconds."""

from __future__ import annotations

from collections import Counter

import pytest

QUICK = {
    "test_ensembles_of_every_architecture_are_right": 3,
    "test_an_ensemble_of_networks_that_draw": 4,
    "test_the_packed_runner_lays_its_channels_side_by_side": 1,
    "test_every_layer_has_the_weights_of_the_formula": 2,
    "test_frozen_predictions_are_distributed_as_draws_are": 2,
    "test_a_smoothed_network_is_packed": 2,
    "test_a_network_compiles_whole": 1,
    "test_heads_and_smoothing_compose": 1,
    "test_two_processes_agree_on_the_best_epoch_and_on_the_last": 0,
    "test_networks_whose_speeds_are_compared_are_laid_out_alike": 1,
    "test_every_method_is_right_or_refuses": 5,
    "test_members_of_a_transformer_predict_and_learn_as_each_alone": 1,
    "test_members_of_such_networks_are_narrow_and_themselves_alone": 12,
    "test_ensemble_sizes_are_table_3s": 0,
    "test_a_study_file_can_be_carried_out_at_both_scales": 1,
    "test_temporal_smoothing_makes_predictions_on_a_noisy_video_more_consistent_and_more_often_right": 1,
}
"""How many cases of a test are quick; the others are slow."""


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name in QUICK:
            seen[name] += 1
            if seen[name] > QUICK[name]:
                item.add_marker(pytest.mark.slow)
