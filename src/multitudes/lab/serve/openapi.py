"""OpenAPI descriptions of the routes: bodies, parameters and answers."""

from __future__ import annotations

from typing import Any


def _schema(kind: str | list[str], description: str = "", **more: Any) -> dict[str, Any]:
    return {"type": kind, **({"description": description} if description else {}), **more}


def _object(**properties: Any) -> dict[str, Any]:
    return _schema("object", properties=properties)


def _list(items: dict[str, Any], description: str = "") -> dict[str, Any]:
    return _schema("array", description, items=items)


def _response(description: str, schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema}}}


ANSWER = _object(
    label=_schema("string", "For classes: the most probable one."),
    confidence=_schema("number", "Its probability."),
    probabilities=_schema("object", additionalProperties=_schema("number")),
    entropy=_schema("number", "Total uncertainty, in nats."),
    mutual_information=_schema("number", "Disagreement between members, in nats."),
    set=_schema(
        ["array", "null"],
        "Conformal set: contains the true class with probability level.",
        items=_schema("string"),
    ),
    mean=_schema("number", "For numbers: the prediction, in the units of the data."),
    std=_schema("number"),
    std_between_members=_schema("number", "Standard deviation of the members' predictions."),
    low=_schema(["number", "null"], "Bounds of the interval at level; null if unbounded."),
    high=_schema(["number", "null"]),
    members=_list(_schema("object"), "Prediction of each member or draw: label and confidence, or mean."),
)
ANSWERS = _object(
    answers=_list(ANSWER),
    level=_schema("number"),
    conformal=_schema("boolean", "True if the coverage is guaranteed."),
    notes=_list(_schema("string")),
)
BODY = {
    **_object(
        rows=_list(_schema("object"), "For tables: values by column, null for missing ones."),
        images=_list(_schema("string", contentEncoding="base64"), "For images: Base64-encoded files."),
        texts=_list(_schema("string"), "For texts."),
    ),
    "minProperties": 1, "maxProperties": 1, "additionalProperties": False,
}  # fmt: skip
LEVEL = _schema("number", exclusiveMinimum=0, exclusiveMaximum=1)
ERROR = {**_object(error=_schema("string", "One sentence.")), "required": ["error"]}
REFUSALS = {
    status: _response(description, ERROR)
    for status, description in {
        "400": "The body cannot be read.",
        "401": "The token is missing or wrong.",
        "413": "The body is too large.",
        "415": "The network does not accept this content type.",
        "422": "The values are invalid.",
        "503": "Too many requests are running; try again after Retry-After.",
        "504": "The request took too long.",
    }.items()
}
GUARDED = {"401": REFUSALS["401"]}

PREDICT: dict[str, Any] = {
    "parameters": [
        {
            "name": "level", "in": "query", "required": False, "schema": LEVEL,
            "description": "Probability that sets and intervals contain the true value.",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": BODY, "example": {"rows": [{"sun": 4.5, "kind": "oak"}]}},
            "image/*": {"schema": _schema("string", format="binary")},
            "text/plain": {"schema": _schema("string")},
        },
    },
    "responses": {"200": _response("One answer per input, in order.", ANSWERS), **REFUSALS},
}  # fmt: skip
DESCRIPTION = "Inputs and outputs of the network, and test inputs with low and high uncertainty."
ABOUT: dict[str, Any] = {"responses": {"200": _response(DESCRIPTION, _schema("object")), **GUARDED}}
HEALTH: dict[str, Any] = {"responses": {"200": _response('{"status": "ok"}', _schema("object"))}}
METRICS: dict[str, Any] = {
    "responses": {"200": _response("Prometheus's text format.", _schema("string"), "text/plain"), **GUARDED}
}
