"""What the reference systems' documents say, how it is written here, and whether it holds.

    python tests/tools/statements.py     writes docs/generated/systems.md

The same table is tried by tests/test_statements.py: settings resolve to a recipe with the values
named, or are refused with the sentence; code is where the row says; a failure is in the table of
known ones; a page says it.
"""

import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from sciftune.core.diagnosis import known_failures
from sciftune.core.recipe import Recipe, RecipeError, resolve
from sciftune.training.monitor import MONITOR_RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/generated/systems.md"
SYSTEMS = dict(
    A="FLUX.2 klein 9B, full fine-tuning",
    B="Qwen-Image-2512, full fine-tuning",
    C="Unified text and image training with FSDP (BAGEL-7B-MoT)",
    D="FLUX.1 LoRA, four ways",
    E="DMD2 distillation of Stable Diffusion 1.5 with FSDP",
)
BASES = dict(  # what a run of the system says anyway
    A=dict(model="klein"),
    B=dict(model="qwenimage"),
    C=dict(model="bagel"),
    D=dict(model="flux1"),
    E=dict(model="sd15", objective="dmd_decoupled"),
)


@dataclass(frozen=True)
class Statement:
    """A row: what a system says, and how it is here."""

    system: str  # A to E
    says: str  # Its statement, in few words
    given: dict = field(default_factory=dict)  # Settings, as that system writes them
    holds: dict = field(default_factory=dict)  # What the recipe has then
    refused: str = ""  # Or what the sentence says that refuses it
    code: str = ""  # Or where it is: 'module.name' below the package
    known: str = ""  # Or the known failure
    page: tuple[str, str] = ("", "")  # Or the file that says it, and a piece of its text

    @property
    def here(self) -> str:
        """How it is written here, in Markdown."""
        if self.given:
            words = "`" + " ".join(f"-p {n} {v}" for n, v in self.given.items()) + "`"
            if self.refused:
                return f"{words} is refused: {self.refused}"
            became = ", ".join(f"`{n}={v!r}`" for n, v in self.holds.items())
            return f"{words} is {became}" if became else f"{words}: nothing to change"
        if self.code:
            return f"`sciftune.{self.code}`"
        if self.known:
            return f"recognised and explained: {self.known}"
        return f"[{self.page[0]}](../../{self.page[0]})"

    def recipe(self) -> Recipe:
        """The recipe of the settings. Raises RecipeError."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return resolve(lambda values: 2, **BASES[self.system] | self.given)

    def fault(self) -> str:
        """What does not hold; '' = all does."""
        if self.given:
            return self._wrong_settings()
        if self.code:
            module, _, name = self.code.rpartition(".")
            text = (ROOT / "sciftune" / f"{module.replace('.', '/')}.py").read_text()
            found = re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b", text, re.M)
            return "" if found else f"no {name} in {module}"
        if self.known:
            names = {*MONITOR_RULES, *(failure.name for failure in known_failures())}
            return "" if self.known in names else "no such failure"
        file, text = self.page
        return "" if text and text in (ROOT / file).read_text() else f"{file} does not say {text!r}"

    def _wrong_settings(self) -> str:
        try:
            recipe = self.recipe()
        except RecipeError as error:
            said = str(error)
            return "" if self.refused and self.refused in said else f"refused: {said}"
        if self.refused:
            return "not refused"
        has = {name: getattr(recipe, name) for name in self.holds}
        return "" if has == self.holds else f"the recipe has {has}"


def taken(system: str, says: str, holds: dict | None = None, **given: object) -> Statement:
    """Settings that are understood."""
    return Statement(system, says, given=given, holds=holds or {})


def not_taken(system: str, says: str, refused: str, **given: object) -> Statement:
    """Settings that are refused with what to write instead."""
    return Statement(system, says, given=given, refused=refused)


def there(system: str, says: str, code: str) -> Statement:
    """Code that does it."""
    return Statement(system, says, code=code)


def known(system: str, says: str, name: str) -> Statement:
    """A failure that is recognised."""
    return Statement(system, says, known=name)


def said(system: str, says: str, file: str, text: str) -> Statement:
    """A page that says it."""
    return Statement(system, says, page=(file, text))


A_RUN = dict(preset="klein_zero3")
B_RUN = dict(preset="qwenimage_zero3_offload")
C_RUN = dict(preset="bagel_fsdp")
E_RUN = dict(preset="sd_dmd2_decoupled")
BLOCKS = "FluxTransformerBlock,FluxSingleTransformerBlock"
STATEMENTS = [
    # A
    taken("A", "the model is FLUX.2 klein 9B", dict(model="klein"), model_type="Flux2Klein"),
    taken(
        "A",
        "its weights are those of the hub",
        dict(model_path="black-forest-labs/FLUX.2-klein-base-9B"),
        pretrained_model_name_or_path="black-forest-labs/FLUX.2-klein-base-9B",
    ),
    taken("A", "full fine-tuning", dict(lora_rank=0), use_lora=False),
    taken("A", "DeepSpeed ZeRO-3 is recommended", dict(strategy="zero3"), **A_RUN),
    taken("A", "in bf16", dict(precision="bf16-mixed"), mixed_precision="bf16"),
    taken(
        "A",
        "`distributed_type: DEEPSPEED`",
        dict(strategy="zero3"),
        distributed_type="DEEPSPEED",
        zero_stage=3,
    ),
    taken("A", "`zero3_init_flag`", {}, zero_stage=3, zero3_init_flag=True),
    taken("A", "`zero3_save_16bit_model`", {}, zero_stage=3, zero3_save_16bit_model=True),
    taken("A", "ZeRO-2 for long runs", dict(strategy="zero2"), zero_stage=2),
    taken("A", "FSDP is the second choice", dict(strategy="fsdp"), use_fsdp=True),
    there(
        "A",
        "started by `accelerate launch --config_file`",
        "strategies.launch_files.launch_command",
    ),
    there(
        "A", "a file of accelerate is taken as it is", "core.accelerate_settings.accelerate_file"
    ),
    said(
        "A", "71 to 72 GB on each of four GPUs", "docs/generated/bench.md", "preset `klein_zero3`"
    ),
    there("A", "7.3 s a step: the plan says the time before", "planner.speed.step_seconds"),
    known("A", "the loss begins at 1.5 to 2.0", "loss starts too high"),
    known("A", "a loss near 6 has a wrong sign", "loss starts too high"),
    there("A", "the target is noise - latents", "objectives.common.velocity.velocity_target"),
    there("A", "latents are patchified and normalised", "models.flux2.Klein"),
    known("A", "`train_micro_batch_size_per_gpu` by hand", "micro-batch unknown to DeepSpeed"),
    taken(
        "A",
        "`train_micro_batch_size_per_gpu`",
        dict(micro_batch=1),
        train_micro_batch_size_per_gpu=1,
    ),
    not_taken("A", "8-bit Adam on one GPU only", "bitsandbytes is not used", use_8bit_adam=True),
    taken("A", "no 8-bit Adam under sharding", {}, use_8bit_adam=False),
    known("A", "8-bit Adam fails under sharding", "8-bit optimizer under sharding"),
    known("A", "FSDP with bf16: types of gradients differ", "types do not match"),
    taken("A", "so `mixed_precision: no` under FSDP", dict(precision="fp32"), mixed_precision="no"),
    taken("A", "and weights in bf16", dict(precision="bf16"), precision="bf16"),
    taken("A", "validation every 100 steps", dict(validation_steps=100), **A_RUN),
    taken("A", "`validation_steps`", dict(validation_steps=100), validation_steps=100),
    there("A", "images in validation_images/step_XXXXXX", "training.validation.sample_prompts"),
    known(
        "A", "sampling under ZeRO-3 failed: weight must be 2-D", "weights used outside the engine"
    ),
    not_taken(
        "A",
        "`train_iteration_func`",
        "the objective computes a step",
        train_iteration_func="Flux2Klein_fulltune_train_iteration",
    ),
    not_taken(
        "A",
        "`validation_func`",
        "validation_steps",
        validation_func="Flux2Klein_fulltune_validation_func_parquet",
    ),
    taken(
        "A",
        "`validation_guidance_scale`",
        dict(validation_guidance=4.0),
        validation_guidance_scale=4.0,
    ),
    taken("A", "`num_inference_steps`", dict(validation_sample_steps=28), num_inference_steps=28),
    taken(
        "A",
        "`log_with`, `tracker_project_name`",
        dict(trackers="wandb"),
        log_with="wandb",
        tracker_project_name="figures",
    ),
    taken("A", "`use_ema`, `ema_decay`", dict(ema_decay=0.9999), use_ema=True, ema_decay=0.9999),
    # B
    taken(
        "B", "the model is Qwen-Image-2512, 20B", dict(model="qwenimage"), model_type="QwenImage"
    ),
    taken(
        "B",
        "its weights are those of the hub",
        dict(model_path="Qwen/Qwen-Image-2512"),
        pretrained_model_name_or_path="Qwen/Qwen-Image-2512",
    ),
    taken(
        "B",
        "ZeRO-3 with the optimizer on the CPU",
        dict(strategy="zero3", offload="optimizer"),
        **B_RUN,
    ),
    taken(
        "B",
        "`offload_optimizer_device: cpu`",
        dict(offload="optimizer"),
        zero_stage=3,
        offload_optimizer_device="cpu",
    ),
    taken(
        "B",
        "`offload_param_device: none`",
        dict(offload="none"),
        zero_stage=3,
        offload_param_device="none",
    ),
    taken("B", "`DS_SKIP_CUDA_CHECK=1`", {}, DS_SKIP_CUDA_CHECK=1),
    known("B", "CUDA of the system and of PyTorch differ", "CUDA mismatch"),
    taken(
        "B",
        "FSDP with CPU offload",
        dict(strategy="fsdp", offload="params"),
        use_fsdp=True,
        fsdp_offload_params=True,
    ),
    taken(
        "B",
        "`fsdp_auto_wrap_policy`",
        {},
        use_fsdp=True,
        fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP",
    ),
    taken(
        "B", "`fsdp_backward_prefetch`", {}, use_fsdp=True, fsdp_backward_prefetch="BACKWARD_PRE"
    ),
    taken(
        "B",
        "`fsdp_cpu_ram_efficient_loading`",
        {},
        use_fsdp=True,
        fsdp_cpu_ram_efficient_loading=True,
    ),
    taken(
        "B",
        "`fsdp_sharding_strategy: FULL_SHARD`",
        dict(strategy="fsdp", reshard=True),
        fsdp_sharding_strategy="FULL_SHARD",
    ),
    taken(
        "B", "`fsdp_state_dict_type`", {}, use_fsdp=True, fsdp_state_dict_type="SHARDED_STATE_DICT"
    ),
    taken("B", "`fsdp_sync_module_states`", {}, use_fsdp=True, fsdp_sync_module_states=True),
    taken("B", "`fsdp_use_orig_params`", {}, use_fsdp=True, fsdp_use_orig_params=True),
    said(
        "B",
        "20 GB on each of four GPUs",
        "docs/generated/bench.md",
        "preset `qwenimage_zero3_offload`",
    ),
    there("B", "225 GB of host memory", "planner.rows.host_parts"),
    there("B", "pure GPU runs out of memory: the plan says it before", "planner.rows.plan_row"),
    there("B", "memory table by strategy, before the launch", "planner.rows.plan_row"),
    there("B", "40 GB parameters, 40 GB gradients, 160 GB states", "planner.profile.profile"),
    there("B", "60 layers, 24 heads of 128, 64 in, 16 out", "models.qwenimage.QwenImage"),
    there("B", "5-D latents and img_shapes", "models.qwenimage.QwenImage"),
    taken("B", "learning rate 5e-6", dict(learning_rate=5e-6), **B_RUN),
    taken("B", "learning rates from 1e-6 to 1e-5", dict(learning_rate=1e-5), learning_rate=1e-5),
    taken(
        "B",
        "gradient checkpointing",
        dict(gradient_checkpointing="full"),
        gradient_checkpointing=True,
    ),
    taken(
        "B",
        "no gradient checkpointing",
        dict(gradient_checkpointing="none"),
        gradient_checkpointing=False,
    ),
    taken("B", "`gradient_clipping: 1.0`", dict(max_grad_norm=1.0), gradient_clipping=1.0),
    taken(
        "B",
        "accumulation 2 on four GPUs: effective batch 8",
        dict(global_batch=8),
        train_batch_size=1,
        gradient_accumulation_steps=2,
        num_processes=4,
        zero_stage=3,
    ),
    taken("B", "5000 steps", dict(steps=5000), max_train_steps=5000),
    there("B", "the loss stays within 0.2 to 1.5", "training.divergence.Divergence"),
    taken("B", "local debug", dict(steps=50), preset="debug"),
    taken("B", "local", dict(strategy="fsdp"), preset="local"),
    taken("B", "cluster", dict(global_batch=64), preset="cluster"),
    taken(
        "B",
        "training data in parquet",
        dict(data="/data/parquet"),
        dataset_parquet_path="/data/parquet",
    ),
    taken("B", "`use_parquet_dataset`", {}, use_parquet_dataset=True),
    not_taken(
        "B",
        "`train_iteration_func`",
        "the objective computes a step",
        train_iteration_func="QwenImage_fulltune_train_iteration",
    ),
    not_taken(
        "B",
        "a validation function of its own",
        "validation_prompts",
        validation_func="QwenImage_fulltune_validation_func_parquet",
    ),
    taken("B", "`report_to: wandb`", dict(trackers="wandb"), report_to="wandb"),
    taken(
        "B",
        "`wandb_project` alone",
        dict(trackers="wandb", tracker_project="QwenImage-20B-FullTune"),
        wandb_project="QwenImage-20B-FullTune",
    ),
    there(
        "B", "loss, learning rate, mean and deviation of latents", "training.intervals.with_numbers"
    ),
    taken(
        "B",
        "`weighting_scheme: logit_normal`",
        dict(timestep_density="logit_normal"),
        weighting_scheme="logit_normal",
    ),
    taken(
        "B",
        "`logit_mean`, `logit_std`, `mode_scale`",
        {},
        logit_mean=0.0,
        logit_std=1.0,
        mode_scale=1.29,
    ),
    taken("B", "`max_sequence_length`", dict(text_tokens=1024), max_sequence_length=1024),
    taken("B", "`dataloader_num_workers`", dict(data_workers=4), dataloader_num_workers=4),
    taken(
        "B",
        "`lr_scheduler`, `lr_warmup_steps`",
        dict(lr_schedule="cosine", warmup_steps=50),
        lr_scheduler="cosine",
        lr_warmup_steps=50,
    ),
    taken("B", "`checkpointing_steps`", dict(checkpoint_steps=500), checkpointing_steps=500),
    taken("B", "`output_dir`", dict(run_root="/data/out", name="a"), output_dir="/data/out/a"),
    taken("B", "`allow_tf32`, `pin_memory`", {}, allow_tf32=True, pin_memory=True),
    known("B", "GPU out of memory", "GPU out of memory"),
    known("B", "host out of memory", "host out of memory"),
    known("B", "a step that is slow", "slow step: slower than planned"),
    known("B", "a loss that does not fall", "loss does not fall"),
    known("B", "an error in validation", "validation error"),
    # C
    taken("C", "the model is BAGEL-7B-MoT", dict(model="bagel"), model="BAGEL-7B-MoT"),
    taken(
        "C",
        "`model_path`, `llm_path`, `vae_path`, `vit_path` together",
        dict(model_path="/bagel"),
        model_path="/bagel",
        llm_path="/qwen",
        vae_path="/ae.safetensors",
        vit_path="/siglip",
    ),
    taken(
        "C",
        "or the parts alone",
        dict(llm_path="/qwen"),
        model_path="parts",
        llm_path="/qwen",
        vae_path="/ae.safetensors",
        vit_path="/siglip",
    ),
    taken("C", "`train_data_path`", dict(data="train.jsonl"), train_data_path="train.jsonl"),
    taken("C", "`val_data_path`", dict(validation_data="val.jsonl"), val_data_path="val.jsonl"),
    taken("C", "validation data are optional", dict(validation_data=""), val_data_path=""),
    there("C", "JSON lines of UnifiedGenerationDataset", "extras.bagel.sequences.read_jsonl"),
    said(
        "C",
        "its tensors are made here",
        "docs/guides/text_and_images.md",
        "`padded_images`) are not accepted",
    ),
    taken(
        "C",
        "`num_nodes`, `node_rank`, `master_addr=localhost`, `master_port`",
        dict(main_process_ip="", main_process_port=12345),
        num_nodes=1,
        node_rank=0,
        master_addr="localhost",
        master_port=12345,
    ),
    taken(
        "C",
        "several nodes",
        dict(num_machines=2, main_process_ip="10.0.0.1", machine_rank=1),
        num_nodes=2,
        node_rank=1,
        master_addr="10.0.0.1",
        sharding_strategy="FULL_SHARD",
        global_batch=8,
    ),
    taken(
        "C",
        "`nproc_per_node`",
        dict(num_processes=8),
        nproc_per_node=8,
        sharding_strategy="FULL_SHARD",
        global_batch=8,
    ),
    taken("C", "`batch_size=1`: a packed sequence", dict(micro_batch=1), batch_size=1),
    taken(
        "C",
        "effective batch = batch_size x accumulation x GPUs = 64",
        dict(micro_batch=1, global_batch=64),
        batch_size=1,
        gradient_accumulation_steps=8,
        num_processes=8,
        sharding_strategy="HYBRID_SHARD",
        num_shard=8,
    ),
    not_taken(
        "C",
        "`batch_size=2` was not implemented",
        "it is 1, a packed sequence",
        batch_size=2,
        global_batch=16,
    ),
    taken("C", "`total_steps=50000`", dict(steps=50000), total_steps=50000),
    taken("C", "learning rate 1e-5", dict(learning_rate=1e-5), **C_RUN),
    taken(
        "C",
        "`learning_rate=5e-6` where it does not converge",
        dict(learning_rate=5e-6),
        learning_rate=5e-6,
    ),
    taken("C", "`warmup_steps=1000`", dict(warmup_steps=1000), **C_RUN),
    taken("C", "`save_every=1000`", dict(checkpoint_steps=1000), save_every=1000),
    taken("C", "`log_every=10`", dict(log_steps=10), log_every=10),
    taken(
        "C",
        "`sharding_strategy=HYBRID_SHARD`, `num_shard=8`",
        dict(strategy="fsdp", hybrid_shard=8),
        sharding_strategy="HYBRID_SHARD",
        num_shard=8,
        global_batch=8,
    ),
    taken("C", "`num_replicate`", {}, num_replicate=1),
    taken("C", "`cpu_offload=False`", dict(offload="none"), cpu_offload="False"),
    taken(
        "C",
        "`cpu_offload=True`",
        dict(offload="params"),
        cpu_offload="True",
        sharding_strategy="FULL_SHARD",
        global_batch=8,
    ),
    taken("C", "`backward_prefetch`", {}, backward_prefetch="BACKWARD_PRE"),
    taken(
        "C",
        "`text_loss_weight`, `image_loss_weight`",
        dict(text_loss_weight=2.0, image_loss_weight=0.5),
        text_loss_weight=2.0,
        image_loss_weight=0.5,
    ),
    taken(
        "C",
        "`ce_weight`, `mse_weight`",
        dict(text_loss_weight=1.0, image_loss_weight=1.0),
        ce_weight=1.0,
        mse_weight=1.0,
    ),
    there(
        "C",
        "total = text loss x weight + image loss x weight",
        "extras.bagel.unified.loss.UnifiedObjective",
    ),
    taken("C", "`freeze_vae=True`", {}, freeze_vae="True"),
    not_taken("C", "`freeze_vae=False`", "the autoencoder is never trained", freeze_vae=False),
    taken("C", "`freeze_llm`", dict(freeze_llm=True), freeze_llm=True),
    taken("C", "`freeze_vit`", dict(freeze_vit=True), freeze_vit="True"),
    taken("C", "EMA is kept by itself", dict(ema_decay=0.9999), **C_RUN),
    taken("C", "`ema`", dict(ema_decay=0.999), ema=0.999),
    there("C", "EMA in shards", "training.ema.EMA"),
    taken("C", "activation checkpointing", dict(gradient_checkpointing="full"), **C_RUN),
    taken("C", "W&B", dict(trackers="wandb", tracker_project="bagel"), wandb_project="bagel"),
    there("C", "W&B rows: ce, mse", "extras.bagel.unified.loss.UnifiedObjective"),
    there("C", "W&B rows: mem_allocated, total_samples", "extras.bagel.unified.task.UnifiedTask"),
    there(
        "C", "checkpoints with EMA and the state of training", "training.checkpoints.Checkpointer"
    ),
    taken("C", "`resume_from`", dict(resume="results/step_5000"), resume_from="results/step_5000"),
    taken("C", "`auto_resume=True`", dict(resume="latest"), auto_resume="True"),
    taken(
        "C",
        "`resume_model_only`, `finetune_from_ema`",
        dict(start_from="a", start_from_ema=True),
        resume_from="a",
        resume_model_only=True,
        finetune_from_ema=True,
    ),
    taken("C", "`num_workers=1`", dict(data_workers=0), num_workers=1),
    taken("C", "`beta2`, `eps`", dict(adam_beta2=0.95, adam_epsilon=1e-15), beta2=0.95, eps=1e-15),
    taken(
        "C",
        "`expected_num_tokens`, `max_num_tokens`",
        dict(expected_tokens=10240, max_tokens=11520),
        preset="local",
        expected_num_tokens=10240,
        max_num_tokens=11520,
    ),
    not_taken(
        "C", "`checkpoint_dir`", "write run_root='results' and name='a'", checkpoint_dir="results/a"
    ),
    known("C", "out of memory", "GPU out of memory"),
    known("C", "data in another form", "unreadable data"),
    # D
    taken("D", "the model is FLUX.1-dev", dict(model="flux1"), model="FLUX.1-dev"),
    taken(
        "D",
        "`pretrained_model_name_or_path`",
        dict(model_path="models/FLUX.1-dev"),
        pretrained_model_name_or_path="models/FLUX.1-dev",
    ),
    taken("D", "plain", dict(strategy="ddp"), preset="flux1_lora_ddp"),
    taken("D", "ZeRO-2", dict(strategy="zero2"), preset="flux1_lora_zero2"),
    taken("D", "ZeRO-3", dict(strategy="zero3"), preset="flux1_lora_zero3"),
    taken("D", "FSDP", dict(strategy="fsdp", reshard=True), preset="flux1_lora_fsdp"),
    taken("D", "`--use_deepspeed`", dict(strategy="zero2"), use_deepspeed=True, zero_stage=2),
    there("D", "`--deepspeed_config_file`", "core.accelerate_settings.deepspeed_file"),
    taken(
        "D",
        "`--deepspeed_multinode_launcher standard`",
        {},
        zero_stage=2,
        deepspeed_multinode_launcher="standard",
    ),
    taken("D", "`--use_fsdp`", dict(strategy="fsdp"), use_fsdp=True),
    taken(
        "D",
        "`fsdp_transformer_layer_cls_to_wrap`",
        {},
        use_fsdp=True,
        fsdp_transformer_layer_cls_to_wrap=BLOCKS,
    ),
    taken(
        "D",
        "`fsdp_sharding_strategy FULL_SHARD`",
        dict(strategy="fsdp", reshard=True),
        fsdp_sharding_strategy="FULL_SHARD",
    ),
    taken(
        "D",
        "`fsdp_state_dict_type SHARDED_STATE_DICT`",
        {},
        use_fsdp=True,
        fsdp_state_dict_type="SHARDED_STATE_DICT",
    ),
    taken(
        "D",
        "`fsdp_backward_prefetch BACKWARD_PRE`",
        {},
        use_fsdp=True,
        fsdp_backward_prefetch="BACKWARD_PRE",
    ),
    taken(
        "D",
        "`fsdp_cpu_ram_efficient_loading False`",
        {},
        use_fsdp=True,
        fsdp_cpu_ram_efficient_loading="False",
    ),
    there("D", "a converter from a ZeRO checkpoint to bf16", "lab.convert.convert_command"),
    there("D", "`--max_shard_size`, `--safe_serialization`", "lab.convert.convert_command"),
    taken(
        "D",
        "`train_data_dir`, `train_data_meta`",
        dict(data="d", metadata="d/metadata.json"),
        train_data_dir="d",
        train_data_meta="d/metadata.json",
    ),
    said("D", "a list with file_path and text", "docs/guides/own_data.md", "file_path"),
    taken("D", "`train_batch_size`", dict(micro_batch=1), train_batch_size=1),
    taken("D", "`image_sample_size`", dict(resolution=1024), image_sample_size=1024),
    taken(
        "D",
        "`gradient_accumulation_steps`",
        dict(global_batch=8),
        gradient_accumulation_steps=1,
        strategy="ddp",
        micro_batch=4,
    ),
    taken("D", "`dataloader_num_workers`", dict(data_workers=8), dataloader_num_workers=8),
    taken(
        "D",
        "`num_train_epochs=100`",
        dict(num_train_epochs=100.0, steps=0),
        preset="flux1_lora_zero2",
    ),
    taken("D", "`checkpointing_steps=50`", dict(checkpoint_steps=50), preset="flux1_lora_zero2"),
    taken("D", "`learning_rate=1e-04`", dict(learning_rate=1e-4), preset="flux1_lora_zero2"),
    taken("D", "no warm-up", dict(warmup_steps=0), preset="flux1_lora_zero2"),
    taken(
        "D",
        "`lr_scheduler constant_with_warmup`",
        dict(lr_schedule="constant"),
        lr_scheduler="constant_with_warmup",
    ),
    taken("D", "`seed`", dict(seed=42), seed=42),
    taken(
        "D",
        "`output_dir`",
        dict(run_root=".", name="output_dir_flux_lora"),
        output_dir="output_dir_flux_lora",
    ),
    taken(
        "D",
        "`gradient_checkpointing`",
        dict(gradient_checkpointing="full"),
        gradient_checkpointing="True",
    ),
    taken("D", "`mixed_precision bf16`", dict(precision="bf16-mixed"), mixed_precision="bf16"),
    taken(
        "D",
        "`adam_weight_decay=3e-2`, `adam_epsilon=1e-10`",
        dict(weight_decay=0.03, adam_epsilon=1e-10),
        adam_weight_decay=3e-2,
        adam_epsilon=1e-10,
    ),
    taken("D", "`vae_mini_batch`", dict(cache_batch=1), vae_mini_batch=1),
    taken("D", "`max_grad_norm=0.05`", dict(max_grad_norm=0.05), max_grad_norm=0.05),
    taken(
        "D", "`enable_bucket`: whole images by resolution", dict(fit="bucket"), enable_bucket=True
    ),
    taken(
        "D",
        "`random_hw_adapt`: sides from 512 to image_sample_size",
        dict(random_hw_adapt=True, bucket_min=512),
        preset="flux1_lora_fsdp",
    ),
    taken(
        "D",
        "`uniform_sampling` of timesteps",
        dict(timestep_density="uniform", stratified=True),
        uniform_sampling=True,
    ),
    taken(
        "D",
        "`rank`, `network_alpha`",
        dict(lora_rank=64, lora_alpha=32.0),
        rank=64,
        network_alpha=32,
    ),
    taken("D", "`target_name`", dict(lora_targets="to_q,to_k"), rank=64, target_name="to_q,to_k"),
    taken("D", "`use_peft_lora`", {}, rank=64, use_peft_lora=True),
    taken(
        "D",
        "`resume_from_checkpoint`: a path",
        dict(resume="a/checkpoint-50"),
        resume_from_checkpoint="a/checkpoint-50",
    ),
    taken(
        "D",
        "`resume_from_checkpoint latest`",
        dict(resume="latest"),
        resume_from_checkpoint="latest",
    ),
    taken(
        "D",
        "`main_process_ip`, `num_machines`, `machine_rank`",
        dict(num_machines=2, machine_rank=1),
        main_process_ip="10.0.0.1",
        main_process_port=10086,
        num_machines=2,
        machine_rank=1,
        strategy="ddp",
    ),
    taken("D", "`NCCL_IB_DISABLE=1`", dict(nccl_ib_disable=True), NCCL_IB_DISABLE=1),
    taken("D", "`NCCL_P2P_DISABLE=1`", dict(nccl_p2p_disable=True), NCCL_P2P_DISABLE=1),
    taken("D", "`report_to tensorboard`", dict(trackers="tensorboard"), report_to="tensorboard"),
    known("D", "a model that cannot be had", "model cannot be had"),
    # E
    taken(
        "E",
        "the model is Stable Diffusion 1.5",
        dict(model="sd15"),
        model_id="stable-diffusion-v1-5/stable-diffusion-v1-5",
    ),
    taken("E", "`sdxl`", dict(model="sdxl"), sdxl=True, model=None),
    taken("E", "`distributed_type: FSDP`", dict(strategy="fsdp"), distributed_type="FSDP"),
    taken("E", "`mixed_precision: bf16`", dict(precision="bf16-mixed"), mixed_precision="bf16"),
    taken("E", "`downcast_bf16: yes`", {}, downcast_bf16="yes"),
    taken(
        "E",
        "`fsdp_transformer_layer_cls_to_wrap`",
        {},
        use_fsdp=True,
        fsdp_transformer_layer_cls_to_wrap="BasicTransformerBlock,ResnetBlock2D",
    ),
    taken(
        "E",
        "`fsdp_backward_prefetch_policy`",
        {},
        use_fsdp=True,
        fsdp_backward_prefetch_policy="BACKWARD_PRE",
    ),
    taken(
        "E",
        "`fsdp_forward_prefetch: false`",
        dict(prefetch=0),
        use_fsdp=True,
        fsdp_forward_prefetch=False,
    ),
    not_taken(
        "E",
        "`fsdp_forward_prefetch: true`",
        "prefetch=1 gathers a block ahead",
        use_fsdp=True,
        fsdp_forward_prefetch=True,
    ),
    taken(
        "E",
        "`fsdp_offload_params: false`",
        dict(offload="none"),
        use_fsdp=True,
        fsdp_offload_params=False,
    ),
    taken(
        "E",
        "`fsdp_offload_params: true`",
        dict(offload="params"),
        use_fsdp=True,
        fsdp_offload_params=True,
    ),
    not_taken(
        "E",
        "`fsdp_sharding_strategy: 1` (its table says HYBRID_SHARD for 3)",
        "FULL_SHARD",
        fsdp_sharding_strategy=1,
    ),
    taken("E", "FULL_SHARD", dict(strategy="fsdp", reshard=True), **E_RUN),
    taken("E", "`fsdp_sync_module_states`", {}, use_fsdp=True, fsdp_sync_module_states=True),
    taken("E", "`fsdp_use_orig_params`", {}, use_fsdp=True, fsdp_use_orig_params=True),
    taken(
        "E",
        "`fsdp_auto_wrap_policy: SIZE_BASED_WRAP`, `fsdp_min_num_params`",
        {},
        use_fsdp=True,
        fsdp_auto_wrap_policy="SIZE_BASED_WRAP",
        fsdp_min_num_params=50000000,
    ),
    not_taken(
        "E",
        "`fsdp_state_dict_type: LOCAL_STATE_DICT`",
        "FSDP2 no longer has LOCAL_STATE_DICT",
        use_fsdp=True,
        fsdp_state_dict_type="LOCAL_STATE_DICT",
    ),
    taken("E", "`use_fp16`: bf16 by autocast", dict(precision="bf16-mixed"), use_fp16=True),
    taken("E", "`initialize_generator`", {}, initialize_generator=True),
    taken("E", "`ckpt_only_path`", dict(start_from="a/b"), ckpt_only_path="a/b"),
    taken("E", "`output_path`", dict(run_root="/data/out"), output_path="/data/out"),
    not_taken("E", "`tiny_vae`", "decoded by the model's own autoencoder", tiny_vae=True),
    there("E", "generator, teacher and critic", "objectives.dmd.task.DistillationTask"),
    taken("E", "the generator is trained whole", dict(lora_rank=0), generator_lora=False),
    taken(
        "E", "`generator_lora`, `lora_rank`", dict(lora_rank=64), generator_lora=True, lora_rank=64
    ),
    there("E", "the teacher is frozen", "objectives.dmd.loss.teacher_of"),
    there(
        "E",
        "guidance and matching at separate timesteps",
        "objectives.dmd.loss.decoupled_gradients",
    ),
    taken(
        "E",
        "`generator_lr=1e-5`, `guidance_lr=5e-6`",
        dict(learning_rate=1e-5, critic_learning_rate=5e-6),
        generator_lr=1e-5,
        guidance_lr=5e-6,
    ),
    taken("E", "`real_guidance_scale=1.75`", dict(real_guidance=1.75), real_guidance_scale=1.75),
    taken("E", "`fake_guidance_scale=1.0`", {}, fake_guidance_scale=1.0),
    taken("E", "batch 4 on 2 GPUs", dict(micro_batch=4, global_batch=8), **E_RUN),
    taken("E", "`dfake_gen_update_ratio`", dict(generator_every=5), dfake_gen_update_ratio=5),
    taken(
        "E",
        "`gradient_checkpointing`",
        dict(gradient_checkpointing="full"),
        gradient_checkpointing=True,
    ),
    there(
        "E",
        "one precision policy: parameters, compute, reduction, loss",
        "strategies.precision.Policy",
    ),
    known("E", "parameters are upcast by accelerate", "accelerate upcasts parameters"),
    known("E", "deprecated calls", "deprecated calls"),
    there(
        "E",
        "types of every tensor in a checkpoint, after it is written",
        "training.checkpoints.tensor_types",
    ),
    there(
        "E",
        "the same weights on all ranks without a file",
        "strategies.trained_module.TrainedModule",
    ),
    said(
        "E",
        "the autoencoder in fp16: here bf16, with the reason",
        "docs/generated/presets.md",
        "type of the autoencoder",
    ),
    said("E", "the text encoder in fp32", "docs/generated/presets.md", "type of the text encoder"),
    there("E", "no dummy network is needed", "objectives.dmd.task.DistillationTask"),
    taken("E", "W&B", dict(trackers="wandb"), **E_RUN),
    taken(
        "E",
        "`cls_on_clean_image`, `gen_cls_loss_weight`",
        dict(gan=True, gan_weight=0.001),
        cls_on_clean_image=True,
        gen_cls_loss_weight=1e-3,
        resolution=512,
    ),
    taken(
        "E",
        "`min_step_percent`, `max_step_percent`",
        dict(dm_min_step=0.0, dm_max_step=1.0),
        min_step_percent=0.0,
        max_step_percent=1.0,
    ),
    taken("E", "`num_denoising_step`", dict(denoising_steps=4), num_denoising_step=4),
]


def page() -> str:
    """docs/generated/systems.md."""
    lines = [
        "# The reference systems, statement by statement",
        "",
        f"{len(STATEMENTS)} statements of the documents of five training systems, and how each",
        "is written here. Every row is tried by `tests/test_statements.py`: settings resolve to",
        "what the row says or are refused with its sentence; of code, known failures and pages",
        "it is tried that they are there, and their own tests show what they do. Values side by",
        "side: [presets](presets.md). Regenerate with `python tests/tools/statements.py`.",
    ]
    for system, title in SYSTEMS.items():
        lines += ["", f"## {system}. {title}", "", "| statement | here |", "|---|---|"]
        for row in STATEMENTS:
            if row.system == system:
                lines.append(f"| {row.says} | {row.here.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, and print what does not hold."""
    PAGE.write_text(page())
    faults = [f"{row.system}: {row.says}: {fault}" for row in STATEMENTS if (fault := row.fault())]
    print("\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
