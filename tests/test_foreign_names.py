"""Names of other scripts, of accelerate and of DeepSpeed are understood, or refused by name.

The names of accelerate are those of its own classes and questionnaire, the names of DeepSpeed those
of its own configuration: a new version that has others fails here.
"""

import json
import re
import warnings
from pathlib import Path

import pytest
import yaml
from additions import added

from sciftune.core.accelerate_settings import _CHOSEN_IN_ZERO
from sciftune.core.recipe import RecipeError, foreign_meanings, foreign_names, resolve
from sciftune.core.recipe_fields import Fields
from sciftune.core.registry import records

FLUX = dict(model="flux1", objective="flow", num_processes=2)
DMD = dict(model="sd15", objective="dmd2")
UNDERSTOOD = [  # (given, what a recipe must hold)
    (dict(model_type="QwenImage"), dict(model="qwenimage")),
    (dict(model_type="Flux2Klein"), dict(model="klein")),
    (dict(model="FLUX.1-dev"), dict(model="flux1")),
    (dict(model="Flux2Klein"), dict(model="klein")),
    (dict(use_8bit_adam=False), {}),
    (dict(gradient_checkpointing=True), dict(gradient_checkpointing="full")),
    (dict(gradient_checkpointing=False), dict(gradient_checkpointing="none")),
    (dict(gradient_checkpointing="true"), dict(gradient_checkpointing="full")),
    (dict(use_deepspeed=True, zero_stage=3), dict(strategy="zero3")),
    (dict(use_deepspeed=True, strategy="zero2"), dict(strategy="zero2")),
    (dict(use_fsdp=True), dict(strategy="fsdp")),
    (dict(distributed_type="FSDP"), dict(strategy="fsdp")),
    (dict(distributed_type="NO", num_processes=1), dict(strategy="single")),
    (dict(distributed_type="MULTI_GPU"), dict(strategy="ddp")),
    (dict(distributed_type="DEEPSPEED", zero_stage=2), dict(strategy="zero2")),
    (dict(zero_stage=3, zero3_init_flag=True, zero3_save_16bit_model=True), dict(strategy="zero3")),
    (dict(zero_stage=3, offload_param_device="cpu"), dict(offload="params")),
    (dict(downcast_bf16="yes", use_fsdp=True), dict(strategy="fsdp")),
    (dict(use_fsdp=True, fsdp_offload_params=True), dict(offload="params")),
    (dict(use_fsdp=True, fsdp_offload_params="false"), dict(offload="none")),
    (dict(use_fsdp=True, fsdp_state_dict_type="SHARDED_STATE_DICT"), dict(strategy="fsdp")),
    (dict(use_fsdp=True, fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP"), dict(strategy="fsdp")),
    (
        FLUX
        | dict(
            use_fsdp=True,
            fsdp_transformer_layer_cls_to_wrap="FluxTransformerBlock,FluxSingleTransformerBlock",
        ),
        dict(strategy="fsdp"),
    ),
    (dict(use_fsdp=True, fsdp_backward_prefetch="BACKWARD_PRE"), dict(prefetch=0)),
    (dict(use_fsdp=True, fsdp_backward_prefetch_policy="BACKWARD_PRE"), dict(prefetch=0)),
    (dict(use_fsdp=True, fsdp_forward_prefetch=False), dict(prefetch=0)),
    (dict(use_fsdp=True, fsdp_cpu_ram_efficient_loading=True), dict(strategy="fsdp")),
    (dict(use_fsdp=True, fsdp_sync_module_states=True), dict(strategy="fsdp")),
    (dict(use_fsdp=True, fsdp_use_orig_params=True), dict(strategy="fsdp")),
    (dict(use_fsdp=True, fsdp_min_num_params=50000000), dict(strategy="fsdp")),
    (dict(use_fsdp=True, fsdp_activation_checkpointing=True), dict(gradient_checkpointing="full")),
    (dict(use_fsdp=True, fsdp_reshard_after_forward=False), dict(reshard=False)),
    (dict(sdxl=True, objective="epsilon"), dict(model="sdxl")),
    (DMD | dict(tiny_vae=False, initialize_generator=True), {}),
    (DMD | dict(ckpt_only_path="a/b"), dict(start_from="a/b")),
    (dict(output_path="/data/out"), dict(run_root="/data/out")),
    (DMD | dict(use_fp16=True), dict(precision="bf16-mixed")),
    (dict(use_fp16=False), {}),
    (dict(wandb_project="figures"), dict(trackers="wandb", tracker_project="figures")),
    (
        dict(wandb_project="figures", report_to="tensorboard"),
        dict(trackers="tensorboard", tracker_project="figures"),
    ),
    (dict(master_addr="localhost", num_nodes=1, node_rank=0), dict(main_process_ip="")),
    *sum(added("UNDERSTOOD"), []),
]
REFUSED = [  # (given, what the sentence must hold: the name, and what to write instead)
    (dict(model_type="QwenImag"), ("model: unknown", "did you mean 'qwenimage'")),
    (dict(model="klein", model_type="QwenImage"), ("model: given twice",)),
    (dict(use_8bit_adam=True), ("use_8bit_adam", "bf16-master24")),
    (dict(use_deepspeed=True), ("use_deepspeed", "zero_stage=2 or 3")),
    (dict(distributed_type="MEGATRON_LM"), ("MEGATRON_LM is not used here", "strategy='fsdp'")),
    (dict(fsdp_state_dict_type="LOCAL_STATE_DICT"), ("fsdp_state_dict_type", "FSDP2 no longer")),
    (dict(fsdp_backward_prefetch="BACKWARD_POST"), ("fsdp_backward_prefetch", "FSDP2 no longer")),
    (dict(fsdp_backward_prefetch_policy="NO_PREFETCH"), ("prefetch_policy", "FSDP2 no longer")),
    (dict(fsdp_forward_prefetch=True), ("fsdp_forward_prefetch", "prefetch=1")),
    (
        dict(model="klein", fsdp_transformer_layer_cls_to_wrap="FluxTransformerBlock"),
        ("fsdp_transformer_layer_cls_to_wrap", "Flux2TransformerBlock"),
    ),
    (dict(train_iteration_func="QwenImage_fulltune_train_iteration"), ("train_iter", "objective")),
    (dict(validation_func="QwenImage_fulltune_validation_func_parquet"), ("validation_steps",)),
    (DMD | dict(tiny_vae=True), ("tiny_vae", "own autoencoder")),
    (dict(tiny_vae=True), ("tiny_vae: needs objective 'dmd2'",)),
    (DMD | dict(initialize_generator=False), ("initialize_generator", "start_from")),
    (dict(use_fp16=True), ("use_fp16", "precision='bf16-mixed'")),
    (dict(accelerate_config="no.yaml"), ("accelerate_config: no.yaml is missing",)),
    *sum(added("NAMES_REFUSED"), []),
    (dict(master_addr="10.0.0.1"), ("main_process_ip: needs num_machines > 1",)),
]


def made(**given):
    "The recipe of these settings, without the line that says what they became."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resolve(lambda values: 2, **given)


@pytest.mark.parametrize("given, holds", UNDERSTOOD, ids=lambda part: next(iter(part), ""))
def test_a_name_is_understood(given, holds):
    recipe = made(**given)
    assert {name: getattr(recipe, name) for name in holds} == holds


@pytest.mark.parametrize("given, says", REFUSED, ids=lambda part: str(next(iter(part), "")))
def test_a_name_is_refused_with_what_to_write(given, says):
    with pytest.raises(RecipeError) as error:
        made(**given)
    for part in says:
        assert part in str(error.value)


@pytest.mark.parametrize("model", records("models"))
def test_hub_ids_of_every_family(model):
    record = records("models")[model]
    own = dict(objective=record.objectives[0])
    recipe = made(model=record.hub, **own)
    assert (recipe.model, recipe.model_path) == (model, record.hub)
    base = record.hub.rpartition("/")[2]
    for name in (base, base.lower(), record.title, *record.also):
        assert made(model=name, **own).model == made(model_type=name, **own).model == model


def accelerate_names():
    "Every setting that accelerate's files and its command know."
    from accelerate.commands.config import cluster as questionnaire
    from accelerate.commands.config import config_args

    names = set(config_args.ClusterConfig.__dataclass_fields__)
    text = Path(questionnaire.__file__).read_text()
    asked = re.findall(r'(?:fsdp|deepspeed|fp8)_config\["(\w+)"\]', text)
    names |= set(asked)
    command = Path(questionnaire.__file__).parents[1] / "launch.py"
    flags = re.findall(r'^ +"--(\w+)",?', command.read_text(), re.M)
    names |= {name for name in flags if name.startswith(("fsdp", "deepspeed", "zero3", "offload"))}
    return names


SECTIONS = {"fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config"}
SECTIONS |= {"megatron_lm_config", "mpirun_config"}  # refused as a whole
FP8 = {"backend", "margin", "interval", "amax_history_length", "amax_compute_algorithm"}
FP8 |= {"override_linear_precision", "use_autocast_during_eval", "optimization_level"}
FP8 |= {"enable_fsdp_float8_all_gather", "pad_inner_dim"}  # fp8_ stands before them, see the reader
TPU = {"command_file", "commands", "tpu_vm", "tpu_env"}  # lists: refused in a file by name


def test_every_setting_of_accelerate_is_known():
    known = foreign_meanings().keys() | Fields.model_fields.keys()
    assert sorted(accelerate_names() - known - SECTIONS - FP8 - TPU) == []


def written(folder, settings, name="config.yaml"):
    "A file of accelerate or DeepSpeed."
    path = folder / name
    dump = json.dumps if path.suffix == ".json" else yaml.safe_dump
    path.write_text(dump(settings))
    return str(path)


FILES = {  # as the questionnaire and the reference systems write them
    "zero3": (
        dict(
            compute_environment="LOCAL_MACHINE",
            debug=False,
            deepspeed_config=dict(
                gradient_accumulation_steps=4,
                gradient_clipping=1.0,
                offload_optimizer_device="cpu",
                offload_param_device="none",
                zero3_init_flag=True,
                zero3_save_16bit_model=True,
                zero_stage=3,
            ),
            distributed_type="DEEPSPEED",
            downcast_bf16="no",
            enable_cpu_affinity=False,
            machine_rank=0,
            main_training_function="main",
            mixed_precision="bf16",
            num_machines=1,
            num_processes=4,
            rdzv_backend="static",
            same_network=True,
            tpu_env=[],
            tpu_use_cluster=False,
            tpu_use_sudo=False,
            use_cpu=False,
        ),
        dict(strategy="zero3", offload="optimizer", precision="bf16-mixed", global_batch=16),
    ),
    "fsdp1": (
        dict(
            distributed_type="FSDP",
            mixed_precision=False,  # 'no' without its quotes
            num_processes=2,
            fsdp_config=dict(
                fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP",
                fsdp_backward_prefetch="BACKWARD_PRE",
                fsdp_cpu_ram_efficient_loading=True,
                fsdp_forward_prefetch=False,
                fsdp_offload_params=True,
                fsdp_sharding_strategy="FULL_SHARD",
                fsdp_state_dict_type="SHARDED_STATE_DICT",
                fsdp_sync_module_states=True,
                fsdp_use_orig_params=True,
            ),
        ),
        dict(strategy="fsdp", reshard=True, offload="params", precision="fp32", num_processes=2),
    ),
    "fsdp2": (
        dict(
            distributed_type="FSDP",
            mixed_precision="fp8",
            num_processes=4,
            fp8_config=dict(backend="AO", pad_inner_dim=True),
            fsdp_config=dict(fsdp_version=2, fsdp_reshard_after_forward=False),
            parallelism_config=dict(
                parallelism_config_dp_replicate_size=2,
                parallelism_config_dp_shard_size=2,
                parallelism_config_tp_size=1,
                parallelism_config_cp_size=1,
            ),
        ),
        dict(strategy="fsdp", reshard=False, hybrid_shard=2, precision="fp8"),
    ),
    "ddp": (
        dict(
            distributed_type="MULTI_CPU",
            use_cpu=True,
            num_processes=2,
            dynamo_config=dict(dynamo_backend="INDUCTOR", dynamo_use_regional_compilation=True),
        ),
        dict(strategy="ddp", cpu=True, compile=True),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_of_accelerate_is_taken(name, tmp_path):
    settings, holds = FILES[name]
    recipe = made(accelerate_config=written(tmp_path, settings), micro_batch=1)
    assert {name: getattr(recipe, name) for name in holds} == holds
    with pytest.warns(UserWarning, match="read as"):
        resolve(accelerate_config=written(tmp_path, settings), micro_batch=1)


def test_what_is_given_beside_a_file_counts_more(tmp_path):
    file = written(tmp_path, FILES["zero3"][0])
    recipe = made(accelerate_config=file, mixed_precision="no", num_processes=2, micro_batch=1)
    assert (recipe.precision, recipe.num_processes, recipe.global_batch) == ("fp32", 2, 8)


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(megatron_lm_config=dict(megatron_lm_tp_degree=2)), "megatron_lm_config is not used"),
        (dict(distributed_type="XLA"), "XLA is not used here"),
        (dict(unheard_of=1), "config.yaml: unheard_of is not used here; remove it"),
        (dict(gpu_ids="0,1"), "gpu_ids: '0,1'; set CUDA_VISIBLE_DEVICES"),
        (dict(fsdp_config=dict(fsdp_forward_prefetch=True)), "prefetch=1 gathers a block ahead"),
        (dict(tpu_vm=["a"]), "tpu_vm is not used here"),
        (dict(compute_environment="AMAZON_SAGEMAKER"), "compute_environment"),
    ],
)
def test_a_setting_of_a_file_is_refused_by_name(settings, says, tmp_path):
    with pytest.raises(RecipeError, match=re.escape(says)):
        made(accelerate_config=written(tmp_path, settings))


def test_a_file_of_deepspeed_behind_one_of_accelerate(tmp_path):
    zero = dict(stage=2, overlap_comm=True, reduce_bucket_size=5e8)
    behind = dict(bf16=dict(enabled=True), zero_optimization=zero, train_batch_size="auto")
    path = written(tmp_path, behind | dict(gradient_accumulation_steps=2), "zero_stage2.json")
    front = dict(distributed_type="DEEPSPEED", num_processes=2)
    front["deepspeed_config"] = dict(deepspeed_config_file=path, zero3_init_flag=False)
    recipe = made(accelerate_config=written(tmp_path, front), micro_batch=1)
    assert (recipe.strategy, recipe.precision, recipe.global_batch) == ("zero2", "bf16-mixed", 4)


def test_every_setting_of_zero_is_chosen_here_or_refused(tmp_path):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    taken = {"stage", "offload_optimizer", "offload_param", "cpu_offload"}
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        given = field.alias or name
        where = written(tmp_path, dict(zero_optimization={"stage": 2, given: 7}), "zero.json")
        if name in taken:
            continue
        if given.removeprefix("stage3_") in _CHOSEN_IN_ZERO:
            assert made(deepspeed_config_file=where).strategy == "zero2"
            continue
        with pytest.raises(RecipeError, match=f"zero_optimization.{given} is not used here"):
            made(deepspeed_config_file=where)


@pytest.mark.parametrize("wrong", [["klein"], "nothing", "", 7, dict(a=1)])
@pytest.mark.parametrize("name", ["model", "model_type", "objective"])
def test_a_wrong_name_beside_others_is_a_sentence(name, wrong):
    beside = dict(use_fp16=True, num_workers=1, fsdp_transformer_layer_cls_to_wrap="A")
    with pytest.raises(ValueError) as error:
        made(**{name: wrong}, **beside)
    assert type(error.value) is RecipeError


def test_meanings_are_told_of_every_name():
    meanings = foreign_meanings()
    names = foreign_names()
    assert {*names.fields, *names.fixed} <= meanings.keys()
    assert all(len(text) > 3 for text in meanings.values())
    assert meanings["fsdp_use_orig_params"].startswith("nothing: FSDP2 no longer has it")
    assert meanings["train_iteration_func"].startswith("refused: ")
