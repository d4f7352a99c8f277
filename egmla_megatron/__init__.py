"""EG-MLA (Embedding-Gated Multi-head Latent Attention) for megatron-core."""

__version__ = "0.1.0"
