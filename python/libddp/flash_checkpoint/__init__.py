"""DLRover's flash checkpoints over libddp.Snapshot: a script imports `libddp.flash_checkpoint` for
`dlrover.trainer.torch.flash_checkpoint`, and nothing else changes.

    from libddp.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    checkpointer = DdpCheckpointer("out/checkpoints")
    state = checkpointer.load_checkpoint()                            # {} where there is none
    checkpointer.save_checkpoint(step, state_dict, storage_type=StorageType.MEMORY)

docs/snapshot_faces.md says what lies where and what differs.
"""
