"""OpenAPI descriptions of the routes: bodies, parameters and answers."""

from __future__ import annotations

from typing import Any


def _of(kind: str | list[str], told: str = "", **more: Any) -> dict[str, Any]:
    return {"type": kind, **({"description": told} if told else {}), **more}


def _object(**properties: Any) -> dict[str, Any]:
    return _of("object", properties=properties)


def _list(items: dict[str, Any], told: str = "") -> dict[str, Any]:
    return _of("array", told, items=items)


def _response(told: str, schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {"description": told, "content": {kind: {"schema": schema}}}


ANSWER = _object(
    label=_of("string", "Of classes: the most probable one."),
    confidence=_of("number", "Its probability."),
    probabilities=_of("object", additionalProperties=_of("number")),
    entropy=_of("number", "All uncertainty, in nats."),
    mutual_information=_of("number", "What members disagree on, in nats."),
    set=_of(
        ["array", "null"],
        "The conformal set: it holds the right class with the probability level.",
        items=_of("string"),
    ),
    mean=_of("number", "Of numbers: the prediction, in the units of the data."),
    std=_of("number"),
    std_between_members=_of("number", "The part of std that members disagree on."),
    low=_of(["number", "null"], "The interval at level; null where it has no bound."),
    high=_of(["number", "null"]),
    members=_list(_of("object"), "What each member, or each draw, predicts alone: label and confidence, or mean."),
)
ANSWERS = _object(
    answers=_list(ANSWER),
    level=_of("number"),
    conformal=_of("boolean", "Whether the level is a guarantee."),
    notes=_list(_of("string")),
)
BODY = {
    **_object(
        rows=_list(_of("object"), "Of a network of tables: values by column, null where one is missing."),
        images=_list(_of("string", contentEncoding="base64"), "Of a network of images: files."),
        texts=_list(_of("string"), "Of a network of texts."),
    ),
    "minProperties": 1, "maxProperties": 1, "additionalProperties": False,
}  # fmt: skip
LEVEL = _of("number", exclusiveMinimum=0, exclusiveMaximum=1)
ERROR = {**_object(error=_of("string", "One sentence.")), "required": ["error"]}
REFUSALS = {
    status: _response(told, ERROR)
    for status, told in {
        "400": "The body cannot be read.",
        "401": "The token is missing or wrong.",
        "413": "The body is too large.",
        "415": "The content type is not for this network.",
        "422": "The values cannot be used.",
        "503": "Too many requests are under way; Retry-After says when to try again.",
        "504": "The request took too long.",
    }.items()
}
GUARDED = {"401": REFUSALS["401"]}

PREDICT: dict[str, Any] = {
    "parameters": [
        {
            "name": "level", "in": "query", "required": False, "schema": LEVEL,
            "description": "How often sets and intervals shall hold what is right.",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": BODY, "example": {"rows": [{"sun": 4.5, "kind": "oak"}]}},
            "image/*": {"schema": _of("string", format="binary")},
            "text/plain": {"schema": _of("string")},
        },
    },
    "responses": {"200": _response("An answer for each input, in their order.", ANSWERS), **REFUSALS},
}  # fmt: skip
TAKES = "What the network takes and gives, and test inputs that it is sure and unsure of."
ABOUT: dict[str, Any] = {"responses": {"200": _response(TAKES, _of("object")), **GUARDED}}
HEALTH: dict[str, Any] = {"responses": {"200": _response('{"status": "ok"}', _of("object"))}}
METRICS: dict[str, Any] = {
    "responses": {"200": _response("Prometheus's text format.", _of("string"), "text/plain"), **GUARDED}
}
