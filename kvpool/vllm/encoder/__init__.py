"""Outputs of encoders (of images, clips, sounds) in the pool: vLLM's interface for them, ``ECConnectorBase``."""
