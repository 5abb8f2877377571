"""What OpenAPI says of each address: bodies, parameters and answers."""

from __future__ import annotations

from typing import Any

__all__ = ["ABOUT", "HEALTH", "METRICS", "PREDICT"]

_ANSWER = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "description": "Of classes: the most probable one."},
        "confidence": {"type": "number", "description": "Its probability."},
        "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
        "entropy": {"type": "number", "description": "All uncertainty, in nats."},
        "mutual_information": {"type": "number", "description": "What members disagree on, in nats."},
        "set": {
            "type": ["array", "null"], "items": {"type": "string"},
            "description": "The conformal set: it holds the right class with the probability level.",
        },
        "mean": {"type": "number", "description": "Of numbers: the prediction, in the units of the data."},
        "std": {"type": "number"},
        "std_between_members": {"type": "number", "description": "The part of std that members disagree on."},
        "low": {"type": ["number", "null"], "description": "The interval at level; null where it has no bound."},
        "high": {"type": ["number", "null"]},
        "members": {
            "type": "array", "items": {"type": "object"},
            "description": "What each member, or each draw, predicts alone: label and confidence, or mean.",
        },
    },
}  # fmt: skip

_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string", "description": "One sentence."}},
    "required": ["error"],
}


def _answer(told: str, schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {"description": told, "content": {kind: {"schema": schema}}}


_REFUSALS = {
    "400": "The body cannot be read.",
    "401": "The token is missing or wrong.",
    "413": "The body is too large.",
    "415": "The content type is not for this network.",
    "422": "The values cannot be used.",
    "503": "Too many requests are under way; Retry-After says when to try again.",
    "504": "The request took too long.",
}

PREDICT: dict[str, Any] = {
    "parameters": [
        {
            "name": "level", "in": "query", "required": False,
            "schema": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "description": "How often sets and intervals shall hold what is right.",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "rows": {
                            "type": "array", "items": {"type": "object"},
                            "description": "Of a network of tables: values by column, null where one is missing.",
                        },
                        "images": {
                            "type": "array", "items": {"type": "string", "contentEncoding": "base64"},
                            "description": "Of a network of images: files.",
                        },
                        "texts": {
                            "type": "array", "items": {"type": "string"}, "description": "Of a network of texts.",
                        },
                    },
                    "minProperties": 1, "maxProperties": 1, "additionalProperties": False,
                },
                "example": {"rows": [{"sun": 4.5, "kind": "oak"}]},
            },
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "text/plain": {"schema": {"type": "string"}},
        },
    },
    "responses": {
        "200": _answer(
            "An answer for each input, in their order.",
            {
                "type": "object",
                "properties": {
                    "answers": {"type": "array", "items": _ANSWER},
                    "level": {"type": "number"},
                    "conformal": {"type": "boolean", "description": "Whether the level is a guarantee."},
                    "notes": {"type": "array", "items": {"type": "string"}},
                },
            },
        ),
        **{status: _answer(told, _ERROR) for status, told in _REFUSALS.items()},
    },
}  # fmt: skip

_OPEN = {"type": "object"}
ABOUT: dict[str, Any] = {
    "responses": {
        "200": _answer("What the network takes and gives, and test inputs that it is sure and unsure of.", _OPEN),
        "401": _answer(_REFUSALS["401"], _ERROR),
    }
}
HEALTH: dict[str, Any] = {"responses": {"200": _answer('{"status": "ok"}', _OPEN)}}
METRICS: dict[str, Any] = {
    "responses": {
        "200": _answer("Prometheus's text format.", {"type": "string"}, "text/plain"),
        "401": _answer(_REFUSALS["401"], _ERROR),
    }
}
