"""What only a model on a CPU needs: kernels, the fused decoder, facts about the processor."""
