"""Denoisers in the layouts that they are published in as one file, as facts about their names."""

import torch

from sciftune.models.family import get_family


def cat_rows(state, original, parts, ends=("weight", "bias")):
    """Join the rows of layers, as the original releases do."""
    for end in ends:
        if all(f"{part}.{end}" in state for part in parts):
            state[f"{original}.{end}"] = torch.cat([state.pop(f"{part}.{end}") for part in parts])


def renamed(state, pairs):
    """Replace beginnings of names."""
    for new, old in pairs:
        for name in [n for n in state if n == old or n.startswith(f"{old}.")]:
            state[new + name.removeprefix(old)] = state.pop(name)


def exchanged(state, new, old):
    """Exchange the halves of a modulation: shift and scale here, scale and shift in diffusers."""
    for end in [n.removeprefix(old) for n in state if n.startswith(f"{old}.")]:
        scale, shift = state.pop(old + end).chunk(2)
        state[new + end] = torch.cat([shift, scale])


def blocks_of(state, stack):
    """Names of the blocks of a stack."""
    return sorted({".".join(n.split(".")[:2]) for n in state if n.startswith(f"{stack}.")})


def to_flux1(state):
    """black-forest-labs/flux: modules/layers.py and util.py."""
    for block in blocks_of(state, "transformer_blocks"):
        new = block.replace("transformer_blocks", "double_blocks")
        for part, names, added, stream in (
            ("img", [f"to_{n}" for n in "qkv"], "", ""),
            ("txt", [f"add_{n}_proj" for n in "qkv"], "added_", "_context"),
        ):
            cat_rows(state, f"{new}.{part}_attn.qkv", [f"{block}.attn.{n}" for n in names])
            out = "to_out.0" if part == "img" else "to_add_out"
            renamed(
                state,
                [
                    (
                        f"{new}.{part}_attn.norm.query_norm.scale",
                        f"{block}.attn.norm_{added}q.weight",
                    ),
                    (
                        f"{new}.{part}_attn.norm.key_norm.scale",
                        f"{block}.attn.norm_{added}k.weight",
                    ),
                    (f"{new}.{part}_attn.proj", f"{block}.attn.{out}"),
                    (f"{new}.{part}_mod.lin", f"{block}.norm1{stream}.linear"),
                    (f"{new}.{part}_mlp.0", f"{block}.ff{stream}.net.0.proj"),
                    (f"{new}.{part}_mlp.2", f"{block}.ff{stream}.net.2"),
                    (f"{new}.{part}_mlp.0", f"{block}.ff{stream}.linear_in"),
                    (f"{new}.{part}_mlp.2", f"{block}.ff{stream}.linear_out"),
                ],
            )
    for block in blocks_of(state, "single_transformer_blocks"):
        new = block.replace("single_transformer_blocks", "single_blocks")
        parts = [*(f"{block}.attn.to_{n}" for n in "qkv"), f"{block}.proj_mlp"]
        cat_rows(state, f"{new}.linear1", parts)
        renamed(
            state,
            [
                (f"{new}.linear1", f"{block}.attn.to_qkv_mlp_proj"),
                (f"{new}.linear2", f"{block}.attn.to_out"),
                (f"{new}.linear2", f"{block}.proj_out"),
                (f"{new}.modulation.lin", f"{block}.norm.linear"),
                (f"{new}.norm.query_norm.scale", f"{block}.attn.norm_q.weight"),
                (f"{new}.norm.key_norm.scale", f"{block}.attn.norm_k.weight"),
            ],
        )
    embedders = [("time_in", "timestep"), ("vector_in", "text"), ("guidance_in", "guidance")]
    for new, old in embedders:
        for where in ("time_text_embed", "time_guidance_embed"):
            layers = (("in_layer", "linear_1"), ("out_layer", "linear_2"))
            renamed(state, [(f"{new}.{a}", f"{where}.{old}_embedder.{b}") for a, b in layers])
    streams = ("double_stream_modulation_img", "double_stream_modulation_txt")
    renamed(state, [(f"{n}.lin", f"{n}.linear") for n in (*streams, "single_stream_modulation")])
    exchanged(state, "final_layer.adaLN_modulation.1", "norm_out.linear")
    renamed(
        state,
        [
            ("img_in", "x_embedder"),
            ("txt_in", "context_embedder"),
            ("final_layer.linear", "proj_out"),
        ],
    )


def to_zimage(state):
    """Tongyi-MAI/Z-Image, and ComfyUI's lumina model."""
    for stack in ("layers", "noise_refiner", "context_refiner"):
        for block in blocks_of(state, stack):
            attention = f"{block}.attention"
            cat_rows(state, f"{attention}.qkv", [f"{attention}.to_{n}" for n in "qkv"])
            renamed(
                state,
                [
                    (f"{attention}.out", f"{attention}.to_out.0"),
                    (f"{attention}.q_norm", f"{attention}.norm_q"),
                    (f"{attention}.k_norm", f"{attention}.norm_k"),
                ],
            )
    renamed(state, [(n, f"all_{n}.2-1") for n in ("x_embedder", "final_layer")])


RESNET = [  # ldm.modules.diffusionmodules.openaimodel.ResBlock
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
    ("skip_connection", "conv_shortcut"),
]


def to_unet(state, config):
    """CompVis/stable-diffusion: openaimodel.UNetModel, whose blocks are numbered through."""
    per = config["layers_per_block"]
    levels = len(config["block_out_channels"])

    def block(new, old):
        renamed(state, [(f"{new}.0.{a}", f"{old[0]}.{b}") for a, b in RESNET])
        renamed(state, [(f"{new}.1", old[1])])

    for i in range(levels):
        for j in range(per):
            old = [f"down_blocks.{i}.{kind}.{j}" for kind in ("resnets", "attentions")]
            block(f"input_blocks.{i * (per + 1) + j + 1}", old)
        sampler = f"input_blocks.{(i + 1) * (per + 1)}.0.op"
        renamed(state, [(sampler, f"down_blocks.{i}.downsamplers.0.conv")])
        for j in range(per + 1):
            old = [f"up_blocks.{i}.{kind}.{j}" for kind in ("resnets", "attentions")]
            block(f"output_blocks.{i * (per + 1) + j}", old)
        last = f"output_blocks.{i * (per + 1) + per}"
        place = 2 if any(n.startswith(f"{last}.1.") for n in state) else 1
        renamed(state, [(f"{last}.{place}.conv", f"up_blocks.{i}.upsamplers.0.conv")])
    for j in range(2):
        pairs = [(f"middle_block.{2 * j}.{a}", f"mid_block.resnets.{j}.{b}") for a, b in RESNET]
        renamed(state, pairs)
    renamed(
        state,
        [
            ("middle_block.1", "mid_block.attentions.0"),
            ("time_embed.0", "time_embedding.linear_1"),
            ("time_embed.2", "time_embedding.linear_2"),
            ("label_emb.0.0", "add_embedding.linear_1"),
            ("label_emb.0.2", "add_embedding.linear_2"),
            ("input_blocks.0.0", "conv_in"),
            ("out.0", "conv_norm_out"),
            ("out.2", "conv_out"),
        ],
    )


def to_autoencoder(state, config):
    """CompVis/latent-diffusion: ldm.modules.diffusionmodules.model, decoder counted backwards."""
    levels = len(config["block_out_channels"])
    for part in ("encoder", "decoder"):
        for i in range(levels):
            up = part == "decoder"
            new, old = ("up", "up_blocks") if up else ("down", "down_blocks")
            new = f"{part}.{new}.{levels - 1 - i if up else i}"
            for j in range(config["layers_per_block"] + up):
                renamed(state, [(f"{new}.block.{j}", f"{part}.{old}.{i}.resnets.{j}")])
            for kind in ("upsample", "downsample"):
                renamed(state, [(f"{new}.{kind}", f"{part}.{old}.{i}.{kind}rs.0")])
        for j in range(2):
            renamed(state, [(f"{part}.mid.block_{j + 1}", f"{part}.mid_block.resnets.{j}")])
        for new, old in (
            ("norm", "group_norm"),
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("proj_out", "to_out.0"),
        ):
            where = f"{part}.mid.attn_1.{new}"
            renamed(state, [(where, f"{part}.mid_block.attentions.0.{old}")])
            if new != "norm":
                state[f"{where}.weight"] = state[f"{where}.weight"][..., None, None]
        renamed(state, [(f"{part}.norm_out", f"{part}.conv_norm_out")])
    for name in [n for n in state if "conv_shortcut" in n]:
        state[name.replace("conv_shortcut", "nin_shortcut")] = state.pop(name)


def in_one_file(name, folder):
    """The tensors of a denoiser in the layout that it is published in as one file."""
    family = get_family(name)
    state = family.load_denoiser(folder).state_dict()
    if family.denoiser_component == "unet":
        to_unet(state, family.config(folder))
        state = {f"model.diffusion_model.{n}": t for n, t in state.items()}
        vae = family.load_vae(folder)
        coder = vae.state_dict()
        to_autoencoder(coder, vae.config)
        return state | {f"first_stage_model.{n}": t for n, t in coder.items()}
    if name in ("flux1", "klein"):
        to_flux1(state)
    if name == "zimage":
        to_zimage(state)
    prefix = "" if name == "flux1" else "model.diffusion_model."
    return {prefix + n: t for n, t in state.items()}
