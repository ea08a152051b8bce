"""engine=deepspeed: ZeRO and its offload by DeepSpeed."""
