"""Prompts in tokens, made here."""
