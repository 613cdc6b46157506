"""Nodes for the shipped demo model: a small Wan with eight prompts and its own linear codec in place of text encoder and VAE."""
from __future__ import annotations

import comfy.latent_formats
import comfy.sd
from comfy_api.latest import io

from ..demo import codec, prompts
from .schema import CATEGORY, declare, schema

DEMO = f"{CATEGORY}/demo"
MODEL_FILE = prompts.FILE.with_name("model.safetensors")


def prompt_names() -> list[str]:
    """The shipped prompts; without their file a line that says so, so that the pack loads all the same."""
    try:
        return prompts.names()
    except OSError:
        return [f"{prompts.FILE.name} is missing: install the pack again"]


class MCSparseDemoModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "MCSparseDemoModel",
            "MC-Sparse Demo Model",
            category=DEMO,
            description="The small video model that comes with MC-Sparse, for trying the nodes without a download. Sample it at 288x288, "
            "49 frames, shift 3, 24 euler steps; it gives 26 frames of 72x72 pixels.",
            inputs=[],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls):
        if not MODEL_FILE.is_file():
            raise ValueError(f"MC-Sparse Demo Model: {MODEL_FILE} is missing. Install the pack again, with its demo folder.")
        return io.NodeOutput(comfy.sd.load_diffusion_model(str(MODEL_FILE)))


class MCSparseDemoPrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "MCSparseDemoPrompt",
            "MC-Sparse Demo Prompt",
            category=DEMO,
            description="One of the prompts the demo model knows, as conditioning; 'nothing' is the empty prompt, for the negative side.",
            inputs=[
                declare(
                    io.Combo.Input, "prompt", options=[*prompt_names(), "nothing"],
                    tooltip="What the clip shows. The demo model knows these prompts only.",
                )
            ],
            outputs=[io.Conditioning.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, prompt):
        return io.NodeOutput([[prompts.embedding("" if prompt == "nothing" else prompt), {}]])


class MCSparseDemoDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "MCSparseDemoDecode",
            "MC-Sparse Demo Decode",
            category=DEMO,
            description="Latents of the demo model to frames, by its fixed linear codec: 2 frames and 2 x 2 pixels per latent position.",
            inputs=[declare(io.Latent.Input, "samples", tooltip="Latent video with 16 channels, from the sampler.")],
            outputs=[io.Image.Output(display_name="frames")],
        )

    @classmethod
    def execute(cls, samples):
        latents = samples["samples"]
        if latents.ndim != 5 or latents.shape[1] != 16:
            raise ValueError(
                f"MC-Sparse Demo Decode: the latent has shape {tuple(latents.shape)}; needed is (batch, 16, frames, height, width), "
                "as Empty HunyuanVideo Latent makes it. Use a VAE for other models."
            )
        clip = codec.decode(comfy.latent_formats.Wan21().process_in(latents.float().cpu()))
        return io.NodeOutput(codec.to_uint8(clip).flatten(0, 1).float() / 255)
