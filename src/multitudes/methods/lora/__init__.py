"""LoRA: layers, conversion, and PEFT files."""

from multitudes.methods.lora.conversion import ROWS, LoraMembers, lora

__all__ = ["ROWS", "LoraMembers", "lora"]
