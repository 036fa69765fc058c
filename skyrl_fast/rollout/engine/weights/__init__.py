"""New weights for a running engine, from `Policy.named_weights` to vLLM's loader.

    trainer   EnginePool.update -> transports.*.send_by_* -> WorkerCall -> Engine.load_weights
    worker    WeightUpdateExtension -> transports.*.receive_by_* -> vLLM's loader -> Receipt
    trainer   check_receipts: the loader took exactly what was sent
    trainer   WeightProbe.verify: the engine computes with it

Design: docs/design/007-rollout-and-weight-sync.md.
"""
