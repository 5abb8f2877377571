"""Low-rank adapters as members: their layers, their conversion, and PEFT's files of them."""

from multitudes.methods.lora.conversion import ROWS, LoraMembers, lora

__all__ = ["ROWS", "LoraMembers", "lora"]
