"""Files of sharded models: snapshots, and safetensors of a whole model."""
