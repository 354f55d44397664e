"""A sample of every key of NeMo's that becomes settings, and the settings that it becomes."""

from typing import Any

from jaxthd.nemo.translation import Code

LLM, ENCODER = Code("LLM"), Code("ENCODER")
LORA = ("model.lora.r", 4)
MTP = ("model.mtp.enabled", True)
SCHEDULE = ("model.lr_scheduler._target_", "nemo.core.optim.lr_scheduler.CosineAnnealing")
NEW = ("model.pretrained_weights", False)
NOISE, ROOMS, NARROW = (
    ("data.train_ds.noise_path", "noise.json"),
    (("data.train_ds.rir_enabled", True), ("data.train_ds.rir_path", "rooms.json")),
    ("data.train_ds.lowpass_enabled", True),
)
SIZES = {
    "feat_in": 16,
    "n_layers": 3,
    "d_model": 48,
    "n_heads": 4,
    "subsampling_factor": 8,
    "subsampling_conv_channels": 8,
    "conv_kernel_size": 7,
}
ENTRY = "data.train_ds.input_cfg.0"


def encoder(**settings: Any) -> tuple[tuple[str, Any], ...]:
    return (NEW, ("model.perception.encoder", SIZES | settings))


def connector(name: str, **settings: Any) -> tuple[tuple[str, Any], ...]:
    adapter = {"_target_": f"nemo.collections.speechlm2.modules.perception.{name}", **settings}
    return (*encoder(), ("model.perception.modality_adapter", adapter))


QFORMER = connector(
    "QformerConnector",
    prompt_size=7,
    target_layer_ids=[1],
    qformer_num_hidden_layers=2,
    encoder_config={"d_model": 48, "encoder_attention_heads": 3},
    llm_config={"hidden_size": 16},
)
Changes = tuple[tuple[str, Any], ...]
SAMPLES: dict[str, tuple[Changes, dict[str, Any]]] = {
    "model.pretrained_llm": ((), {"train.init_from": (LLM, ENCODER), "data.tokenizer": LLM}),
    "model.pretrained_asr": ((), {"train.init_from": (LLM, ENCODER)}),
    "model.pretrained_weights": (encoder(), {"train.init_from": ()}),
    "model.init_from_checkpoint": (
        (("model.init_from_checkpoint", "old"),),
        {"train.init_from": (LLM, ENCODER, "old")},
    ),
    "model.freeze_params": (
        (("model.freeze_params", [r"^llm\..+$", r"^perception\.encoder\..+$"]),),
        {"adapt.freeze": ("head", "decoder.*", "encoder.*")},
    ),
    "model.prevent_freeze_params": (
        (
            ("model.freeze_params", [r"^perception\..+$", r"^embed_tokens\..+$"]),
            ("model.prevent_freeze_params", [r"^perception\.proj\..+$"]),
        ),
        {"adapt.freeze": ("embedding", "encoder.*")},
    ),
    "model.lora.r": ((LORA,), {"adapt.lora_rank": 4}),
    "model.lora.dim": ((("model.lora.dim", 6),), {"adapt.lora_rank": 6}),
    "model.lora.lora_alpha": ((LORA, ("model.lora.lora_alpha", 12)), {"adapt.lora_alpha": 12.0}),
    "model.lora.alpha": ((LORA, ("model.lora.alpha", 12)), {"adapt.lora_alpha": 12.0}),
    "model.lora.use_rslora": ((LORA, ("model.lora.use_rslora", True)), {"adapt.lora_alpha": 16.0}),
    "model.lora.target_modules": (
        (LORA, ("model.lora.target_modules", ["k_proj", "down_proj"])),
        {"adapt.lora_targets": ("decoder.layers.*.mixer.down", "decoder.layers.*.mixer.k")},
    ),
    "model.lora.exclude_modules": (
        (LORA, ("model.lora.exclude_modules", ["v_proj"])),
        {"adapt.lora_targets": ("decoder.layers.*.mixer.q",)},
    ),
    "model.lora.match_all_linear": (
        (LORA, ("model.lora.match_all_linear", True)),
        {"adapt.lora_targets": ("decoder.*",)},
    ),
    "model.lora.lora_dropout": ((LORA, ("model.lora.lora_dropout", 0.1)), {"adapt.lora_dropout": 0.1}),
    "model.lora.dropout": ((LORA, ("model.lora.dropout", 0.1)), {"adapt.lora_dropout": 0.1}),
    "model.lora.use_dora": ((LORA, ("model.lora.use_dora", True)), {"adapt.dora": True}),
    "model.prompt_format": ((("model.prompt_format", "qwen"),), {"data.template": "chatml"}),
    "model.tokenizer_path": ((("model.tokenizer_path", "t.json"),), {"data.tokenizer": "t.json"}),
    "model.audio_locator_tag": ((), {"data.audio_placeholder": "<audio>", "data.prompt": "<audio>"}),
    "model.encoder_chunk_size_seconds": (
        (("model.encoder_chunk_size_seconds", 20),),
        {"encoder.chunk_seconds": 20.0},
    ),
    "model.perception.encoder.feat_in": (encoder(), {"encoder.num_mels": 16}),
    "model.perception.preprocessor.features": (
        (*encoder(feat_in="${x}"), ("model.perception.preprocessor.features", 24), ("x", "features")),
        {"encoder.num_mels": 24},
    ),
    "model.perception.encoder.n_layers": (encoder(), {"encoder.layers": 3}),
    "model.perception.encoder.d_model": (encoder(), {"encoder.dim": 48}),
    "model.perception.encoder.n_heads": (encoder(n_heads=6), {"encoder.heads": 6}),
    "model.perception.encoder.ff_expansion_factor": (
        encoder(ff_expansion_factor=2),
        {"encoder.ffn_dim": 96},
    ),
    "model.perception.encoder.conv_kernel_size": (encoder(), {"encoder.conv_kernel": 7}),
    "model.perception.encoder.subsampling_conv_channels": (encoder(), {"encoder.subsampling_channels": 8}),
    "model.perception.encoder.use_bias": (
        encoder(use_bias=False),
        {"encoder.linear_bias": False, "encoder.conv_bias": False},
    ),
    "model.perception.encoder.xscaling": (encoder(xscaling=False), {"encoder.scale_input": False}),
    "model.perception.modality_adapter._target_": ((), {}),
    "model.perception.modality_adapter.d_model": ((), {}),
    "model.perception.modality_adapter.target_layer_ids": (
        connector("MultiLayerProjectionConnector", target_layer_ids=[-2, 0]),
        {"encoder.output_layers": (0, 1, 2)},
    ),
    "model.perception.modality_adapter.include_final_output": (
        connector("MultiLayerProjectionConnector", target_layer_ids=[1, 0], include_final_output=False),
        {"encoder.output_layers": (0, 1), "encoder.layers": 2},
    ),
    "model.perception.modality_adapter.prompt_size": (
        QFORMER,
        {"encoder.queries": 7, "encoder.output_layers": (1, 2)},
    ),
    "model.perception.modality_adapter.qformer_num_hidden_layers": (QFORMER, {"encoder.query_layers": 2}),
    "model.perception.modality_adapter.encoder_config.encoder_attention_heads": (
        QFORMER,
        {"encoder.query_heads": 3},
    ),
    "model.perception.preprocessor.pad_to": (
        (*QFORMER, ("model.perception.preprocessor.pad_to", 24)),
        {"encoder.pad_to": 24},
    ),
    "model.perception.spec_augment.freq_masks": (
        (("model.perception.spec_augment", {"freq_masks": 2, "freq_width": 27}),),
        {"data.spec_augment.freq": (2, 27)},
    ),
    "model.perception.spec_augment.freq_width": (
        (("model.perception.spec_augment", {"freq_masks": 1}),),
        {"data.spec_augment.freq": (1, 10)},
    ),
    "model.perception.spec_augment.time_masks": (
        (("model.perception.spec_augment", {"time_masks": 5, "time_width": 0.02}),),
        {"data.spec_augment.time": (5, 0.02)},
    ),
    "model.perception.spec_augment.time_width": (
        (("model.perception.spec_augment", {"time_masks": 5, "time_width": 5}),),
        {"data.spec_augment.time": (5, 0.05)},
    ),
    "model.aux_loss_coeff": ((("model.aux_loss_coeff", 0.01),), {"train.aux_loss": 0.01}),
    "model.train_gate": ((("model.train_gate", True),), {}),
    "model.mtp.enabled": ((MTP,), {"train.mtp_loss": 0.1}),
    "model.mtp.training_mode": (
        (MTP, ("model.mtp.training_mode", "head_only")),
        {"adapt.freeze": ("*", "!mtp.*")},
    ),
    "model.mtp.num_nextn_predict_layers": ((MTP, ("model.mtp.num_nextn_predict_layers", 2)), {}),
    "model.mtp.hybrid_override_pattern": ((MTP, ("model.mtp.hybrid_override_pattern", "*E")), {}),
    "model.mtp.replace_existing_head": ((MTP, ("model.mtp.replace_existing_head", True)), {}),
    "model.mtp.loss_scaling_factor": (
        (MTP, ("model.mtp.loss_scaling_factor", 0.3)),
        {"train.mtp_loss": 0.3},
    ),
    "model.mtp.use_repeated_layer": ((MTP, ("model.mtp.use_repeated_layer", True)), {}),
    "model.automodel_backend.te_fp8": (
        (("model.automodel_backend.te_fp8", {"recipe": "block"}),),
        {"compute.fp8": ("decoder.layers.*",)},
    ),
    "model.automodel_backend.te_fp8.recipe": (
        (("model.automodel_backend.te_fp8.recipe", "current"),),
        {"compute.fp8": ("decoder.layers.*",)},
    ),
    "model.optimizer._target_": (
        (("model.optimizer._target_", "flashoptim.FlashLion"),),
        {"train.optimizer": "lion", "train.optimizer_options": ("beta1=0.9", "beta2=0.99")},
    ),
    "model.optimizer.lr": ((), {"train.learning_rate": 1e-4}),
    "model.optimizer.betas": (
        (("model.optimizer.betas", [0.8, 0.98]),),
        {"train.optimizer_options": ("beta1=0.8", "beta2=0.98")},
    ),
    "model.optimizer.weight_decay": ((("model.optimizer.weight_decay", 0.1),), {"train.weight_decay": 0.1}),
    "model.lr_scheduler._target_": ((SCHEDULE,), {"train.schedule": "cosine"}),
    "model.lr_scheduler.warmup_steps": (
        (SCHEDULE, ("model.lr_scheduler.warmup_steps", 7)),
        {"train.warmup_steps": 7},
    ),
    "model.lr_scheduler.warmup_ratio": (
        (SCHEDULE, ("model.lr_scheduler.warmup_ratio", 0.2)),
        {"train.warmup_steps": 20},
    ),
    "model.lr_scheduler.min_lr": (
        (SCHEDULE, ("model.lr_scheduler.min_lr", 1e-6)),
        {"train.min_learning_rate": 1e-6},
    ),
    "data.train_ds.input_cfg": ((), {"data.manifest": ("a.json",)}),
    "data.train_ds.type": (((f"{ENTRY}.type", "nemo"),), {"data.manifest": ("a.json",)}),
    "data.train_ds.manifest_filepath": (
        ((f"{ENTRY}.manifest_filepath", [["a.json", 1], ["b.json", 3]]),),
        {"data.manifest": ("a.json", "b.json"), "data.weights": (0.25, 0.75)},
    ),
    "data.train_ds.tarred_audio_filepaths": (
        ((f"{ENTRY}.tarred_audio_filepaths", "a__OP_0..3_CL_.tar"),),
        {"data.manifest": ("a.json::a__OP_0..3_CL_.tar",)},
    ),
    "data.train_ds.shar_path": (
        ((ENTRY, {"type": "lhotse_shar", "shar_path": ["one", "two"]}),),
        {"data.manifest": ("one", "two")},
    ),
    "data.train_ds.cuts_path": (
        ((ENTRY, {"type": "lhotse", "cuts_path": "c.jsonl.gz"}),),
        {"data.manifest": ("cuts:c.jsonl.gz",)},
    ),
    "data.train_ds.text_field": (((f"{ENTRY}.text_field", "said"),), {"data.columns": ("text=said",)}),
    "data.train_ds.lang_field": (((f"{ENTRY}.lang_field", "language"),), {}),
    "data.train_ds.audio_field": (((f"{ENTRY}.audio_field", "wav"),), {"data.columns": ("audio=wav",)}),
    "data.train_ds.duration_field": (
        ((f"{ENTRY}.duration_field", "s"),),
        {"data.columns": ("duration=s",)},
    ),
    "data.train_ds.weight": (
        (
            (
                "data.train_ds.input_cfg",
                [
                    {"manifest_filepath": "a.json", "weight": 1},
                    {
                        "type": "group",
                        "weight": 3,
                        "input_cfg": [
                            {"manifest_filepath": "b.json", "weight": 0.5},
                            {"manifest_filepath": "c.json", "weight": 1.5},
                        ],
                    },
                ],
            ),
        ),
        {"data.weights": (0.25, 0.1875, 0.5625)},
    ),
    "data.train_ds.reweight_temperature": (
        (
            (
                "data.train_ds.input_cfg",
                [{"manifest_filepath": "a.json", "weight": 1}, {"manifest_filepath": "b.json", "weight": 9}],
            ),
            ("data.train_ds.reweight_temperature", 0.5),
        ),
        {"data.weights": (0.25, 0.75)},
    ),
    "data.train_ds.tags.context": (
        ((f"{ENTRY}.tags", {"context": "Write:"}),),
        {"data.prompt": "Write: <audio>"},
    ),
    "data.train_ds.tags.system_prompt": (
        ((f"{ENTRY}.tags", {"system_prompt": "Be brief."}),),
        {"data.system_prompt": "Be brief."},
    ),
    "data.train_ds.prompt_format": ((("data.train_ds.prompt_format", "plain"),), {"data.template": "plain"}),
    "data.train_ds.audio_locator_tag": (
        ((f"{ENTRY}.audio_locator_tag", "<audio>"),),
        {"data.audio_placeholder": "<audio>"},
    ),
    "data.train_ds.batch_tokens": (
        (("data.train_ds.batch_tokens", 4000), ("data.train_ds.use_multimodal_sampling", True)),
        {"data.capacity": 4032},
    ),
    "data.train_ds.batch_duration": ((("data.train_ds.batch_duration", 100),), {"data.capacity": 1280}),
    "data.train_ds.shuffle": ((("data.train_ds.shuffle", True),), {"data.shuffle": True}),
    "data.train_ds.seed": ((), {"data.seed": 1, "train.seed": 1}),
    "data.train_ds.num_workers": ((("data.train_ds.num_workers", 3),), {"data.workers": 3}),
    "data.train_ds.min_duration": (
        (("data.train_ds.min_duration", 0.3),),
        {"data.filter.seconds": (0.3, 0.0)},
    ),
    "data.train_ds.max_duration": (
        (("data.train_ds.max_duration", 20),),
        {"data.filter.seconds": (0.0, 20.0)},
    ),
    "data.train_ds.min_tps": (
        (("data.train_ds.min_tps", 1),),
        {"data.filter.tokens_per_second": (1.0, 0.0)},
    ),
    "data.train_ds.max_tps": (
        (("data.train_ds.max_tps", 12),),
        {"data.filter.tokens_per_second": (0.0, 12.0)},
    ),
    "data.train_ds.noise_path": ((NOISE,), {"data.augment.noise_manifest": "noise.json"}),
    "data.train_ds.noise_snr": ((NOISE,), {"data.augment.noise_snr": (10.0, 20.0)}),
    "data.train_ds.noise_mix_prob": (
        (NOISE, ("data.train_ds.noise_mix_prob", 0.25)),
        {"data.augment.shares": ("noise=0.25",)},
    ),
    "data.train_ds.perturb_speed": (
        (("data.train_ds.perturb_speed", True),),
        {"data.augment.speed": (0.9, 1.0, 1.1)},
    ),
    "data.train_ds.rir_enabled": (ROOMS, {"data.augment.shares": ("room=0.5",)}),
    "data.train_ds.rir_path": (ROOMS, {"data.augment.room_manifest": "rooms.json"}),
    "data.train_ds.rir_prob": (
        (*ROOMS, ("data.train_ds.rir_prob", 0.2)),
        {"data.augment.shares": ("room=0.2",)},
    ),
    "data.train_ds.lowpass_enabled": ((NARROW,), {"data.augment.shares": ("low_pass=0.5",)}),
    "data.train_ds.lowpass_frequencies_interval": (
        (NARROW, ("data.train_ds.lowpass_frequencies_interval", [3000, 4000])),
        {"data.augment.low_pass_hz": (3000.0, 4000.0)},
    ),
    "data.train_ds.lowpass_prob": (
        (NARROW, ("data.train_ds.lowpass_prob", 1)),
        {"data.augment.shares": ("low_pass=1",)},
    ),
    "data.validation_ds.datasets": ((), {"data.validation_manifest": "dev=b.json"}),
    "trainer.devices": ((("trainer.devices", 4),), {"mesh.data": 4, "data.rows": 4}),
    "trainer.num_nodes": ((("trainer.devices", 4), ("trainer.num_nodes", 2)), {"mesh.data": 8}),
    "trainer.precision": ((("trainer.precision", "bf16-flash"),), {"compute.dtype": "bfloat16"}),
    "trainer.max_steps": ((), {"train.steps": 100}),
    "trainer.max_epochs": ((("trainer.max_steps", -1), ("trainer.max_epochs", 3)), {"train.steps": 60}),
    "trainer.limit_train_batches": ((), {"train.validate_every": 20, "train.checkpoint_every": 20}),
    "trainer.val_check_interval": ((("trainer.val_check_interval", 0.25),), {"train.validate_every": 5}),
    "trainer.check_val_every_n_epoch": (
        (("trainer.check_val_every_n_epoch", 2),),
        {"train.validate_every": 40},
    ),
    "trainer.limit_val_batches": ((("trainer.limit_val_batches", 10),), {"train.validation_batches": 10}),
    "trainer.gradient_clip_val": ((("trainer.gradient_clip_val", 0.5),), {"train.clip_norm": 0.5}),
    "trainer.accumulate_grad_batches": (
        (("trainer.accumulate_grad_batches", 4), ("trainer.devices", 2)),
        {"train.microbatches": 4, "data.rows": 8, "train.validate_every": 5},
    ),
    "trainer.max_time": ((("trainer.max_time", {"hours": 2}),), {"train.max_seconds": 7200.0}),
    "trainer.strategy": ((("trainer.strategy", "ddp"),), {"mesh.fsdp": False}),
    "trainer.strategy._target_": (
        (("trainer.strategy._target_", "lightning.pytorch.strategies.DDPStrategy"),),
        {"mesh.fsdp": False},
    ),
    "trainer.strategy.dp_size": ((("trainer.strategy.dp_size", 4),), {"mesh.data": 4}),
    "trainer.strategy.data_parallel_size": (
        (("trainer.strategy.data_parallel_size", 4),),
        {"mesh.data": 4},
    ),
    "trainer.strategy.tp_size": (
        (("trainer.strategy.tp_size", 2), ("trainer.devices", 8)),
        {"mesh.tensor": 2, "mesh.data": 4},
    ),
    "trainer.strategy.tensor_parallel_size": (
        (("trainer.strategy.tensor_parallel_size", 2), ("trainer.devices", 8)),
        {"mesh.tensor": 2, "mesh.data": 4},
    ),
    "trainer.strategy.cp_size": (
        (("trainer.strategy.cp_size", 2), ("trainer.devices", 8)),
        {"mesh.context": 2, "mesh.data": 4},
    ),
    "trainer.strategy.pp_size": (
        (("trainer.strategy.pp_size", 2), ("trainer.devices", 8)),
        {"mesh.pipeline": 2, "mesh.data": 4},
    ),
    "trainer.strategy.distributed_config.sequence_parallel": (
        (("trainer.strategy.distributed_config.sequence_parallel", True),),
        {"compute.sequence_sharded": True},
    ),
    "trainer.strategy.activation_checkpointing_llm": (
        (("trainer.strategy.activation_checkpointing_llm", True),),
        {"compute.remat": "full"},
    ),
    "trainer.strategy.activation_checkpointing_perception": (
        (("trainer.strategy.activation_checkpointing_perception", True),),
        {"compute.remat": "full"},
    ),
    "exp_manager.create_tensorboard_logger": (
        (("exp_manager.create_tensorboard_logger", False),),
        {"train.trackers": ()},
    ),
    "exp_manager.create_wandb_logger": (
        (("exp_manager.create_wandb_logger", True),),
        {"train.trackers": ("tensorboard", "wandb")},
    ),
    "exp_manager.create_mlflow_logger": (
        (("exp_manager.create_mlflow_logger", True),),
        {"train.trackers": ("tensorboard", "mlflow")},
    ),
    "exp_manager.checkpoint_callback_params.every_n_train_steps": (
        (("exp_manager.checkpoint_callback_params.every_n_train_steps", 5),),
        {"train.checkpoint_every": 5},
    ),
    "exp_manager.checkpoint_callback_params.every_n_epochs": (
        (("exp_manager.checkpoint_callback_params.every_n_epochs", 2),),
        {"train.checkpoint_every": 40},
    ),
    "exp_manager.checkpoint_callback_params.save_top_k": (
        (("exp_manager.checkpoint_callback_params.save_top_k", 2),),
        {"train.keep_checkpoints": 2},
    ),
    "exp_manager.max_time_per_run": (
        (("exp_manager.max_time_per_run", "00:03:50:00"),),
        {"train.max_seconds": 13800.0},
    ),
    "exp_manager.ema.enable": ((("exp_manager.ema.enable", True),), {"train.ema_decay": 0.999}),
    "exp_manager.ema.decay": (
        (("exp_manager.ema", {"enable": True, "decay": 0.9}),),
        {"train.ema_decay": 0.9},
    ),
    "exp_manager.ema.validate_original_weights": (
        (("exp_manager.ema", {"enable": True, "validate_original_weights": True}),),
        {"train.validate_ema": False},
    ),
}
"""A key that becomes settings -> what is changed in an experiment, and settings that it then has.

Settings of a new encoder are called encoder.NAME; what is made of mtp is in test_import_config.py.
"""
