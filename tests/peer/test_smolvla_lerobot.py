"""SmolVLA by LeRobot's own class: a tiny one made here trains by the ordinary command, and the errors are its own.

For lerobot 0.6.1 and transformers 5.5; skipped where they are not installed: README.md tells how.
"""

import importlib.util
import json
import os

import pytest

if lacking := [name for name in ("lerobot", "transformers", "num2words") if importlib.util.find_spec(name) is None]:
    pytest.skip(f"not installed: {', '.join(lacking)} (make peer)", allow_module_level=True)

import torch
import torchvision_shim
from conftest import ROOT, succeed

torchvision_shim.load()
from lerobot.configs.policies import PreTrainedConfig  # noqa: E402
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.factory import make_pre_post_processors  # noqa: E402
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig  # noqa: E402
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_robot import record, task_of  # noqa: E402
from tokenizers import Tokenizer, pre_tokenizers  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from engine.contract import sample_seeds, uniform  # noqa: E402

SPECIAL = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`pretrained_model` of a SmolVLA of 0.1 million parameters over a vision-language model of its own."""
    out = tmp_path_factory.mktemp("smolvlm")
    words = ["<pad>", "<unk>", "<s>", "</s>", *SPECIAL.values(), "walk", "0", "1"]
    tokens = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, extra_special_tokens=SPECIAL, **names)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(out)
    heads = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    SmolVLMConfig(
        text_config=heads | text | {"vocab_size": len(words)},
        vision_config=heads | {"num_hidden_layers": 1, "image_size": 64, "patch_size": 16},
        scale_factor=2,
        image_token_id=4,
        pad_token_id=0,
    ).save_pretrained(out)
    config = SmolVLAConfig(
        vlm_model_name=str(out),
        load_vlm_weights=False,
        num_vlm_layers=2,
        resize_imgs_with_padding=(64, 64),
        chunk_size=6,
        n_action_steps=6,
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
            "observation.images.elsewhere": PolicyFeature(FeatureType.VISUAL, (3, 64, 64)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        device="cpu",
        push_to_hub=False,
    )
    torch.manual_seed(0)
    SmolVLAPolicy(config).save_pretrained(out / "pretrained_model")
    return out / "pretrained_model"


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return record(tmp_path_factory.mktemp("walks") / "set")


def words(folder, walks):
    where = [f"policy.pretrained_path={folder}", f"dataset.root={walks}"]
    return ["robot", "policy.type=smolvla", *where, "policy.chunk_size=6", "dataset.cache=none"]


@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_by_the_ordinary_command(launch, tmp_path, folder, walks, processes):
    """And what it was: the vision-language model stays as it is, the expert learns."""
    run = ["train_ddp.py", *words(folder, walks), "batch_size=4", "steps=4", "lr=1e-3", "schedule.warmup_steps=1"]
    shim = tmp_path / "shim"  # the real environments of users have a torchvision that loads
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(ROOT / 'tests/peer')!r})\nimport torchvision_shim\ntorchvision_shim.load()\n"
    )
    launch.may_stay.append("tmp")  # LeRobot never removes the config that it writes for its parser
    path = os.pathsep.join([str(shim), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = succeed(launch.torchrun(processes, *run, f"save_dir={tmp_path / 'run'}", PYTHONPATH=path))
    assert "Done: 4 steps" in done.out
    last = torch.load(tmp_path / "run/last.pt", weights_only=True)["model"]
    before = SmolVLAPolicy.from_pretrained(str(folder)).state_dict()
    changed = {name for name in before if not torch.equal(before[name], last[f"net.policy.{name}"])}
    assert changed and not any(".vlm." in name for name in changed)
    out = tmp_path / "out"
    succeed(launch.python("tools/save_pretrained.py", str(tmp_path / "run"), str(out), PYTHONPATH=path))
    saved = SmolVLAPolicy.from_pretrained(str(out)).state_dict()
    assert all(torch.equal(saved[name], last[f"net.policy.{name}"]) for name in saved)
    make_pre_post_processors(PreTrainedConfig.from_pretrained(str(out)), pretrained_path=str(out))


def test_the_errors_are_its_own(folder, walks):
    """Its own loss of each sample is the mean over unpadded steps and over the dimensions that there are."""
    task, train, _ = task_of(*words(folder, walks))
    policy = task.model().eval()
    rows = [n for n in range(len(train)) if train.weights[n] == 6][:5]
    batch = task._with_words(train.__getitems__(rows))
    draws = uniform(sample_seeds(0, 0, torch.arange(len(rows))), policy.net.num_draws)
    theirs = policy.net.policy
    noise = policy.net.noise(draws[:, 1:]).view(len(rows), 6, -1)
    for steps in (6, 4):
        batch["action_is_pad"][:, steps:] = True
        inputs = policy.inputs(batch)
        tokens = {"observation.language.tokens": inputs["words"].clamp(min=0)}
        tokens["observation.language.attention_mask"] = inputs["words"] >= 0
        own, _ = theirs.forward(inputs | tokens, noise, policy.net.time(draws[:, 0]), reduction="none")
        torch.testing.assert_close(policy(batch, draws)["error"], own * steps * 3)
    assert policy.act(batch).shape == (len(rows), 6, 3)


def test_lerobot_runs_what_was_saved(folder, walks, tmp_path):
    """The commands that a robot is driven with: its own pipelines and `select_action`, over an episode."""
    task, train, _ = task_of(*words(folder, walks), "policy.normalization_mapping.ACTION=MIN_MAX")
    policy = task.model().eval()
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):  # not what it started from
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    out = tmp_path / "out"
    task.save_pretrained(policy, out)
    config = PreTrainedConfig.from_pretrained(str(out))
    before, after = make_pre_post_processors(config, pretrained_path=str(out))
    theirs = SmolVLAPolicy.from_pretrained(str(out), config=config, strict=True)
    episode = train.told["episode_index"][train.rows]
    rows = [n for n in range(len(train)) if episode[n] == episode[0]]
    assert len(rows) > 6
    batch = train.__getitems__(rows)
    draws = uniform(sample_seeds(0, 0, torch.arange(len(rows))), policy.net.num_noise)
    with torch.no_grad():
        ours = policy.act(task._with_words(batch), draws)  # (B, chunk, A)
    for n in range(len(rows)):
        seen = {name: batch[name][n] for name in task.dims}
        seen |= {name: batch[name][n].float() / 255 for name in task.cameras}
        seen["task"] = task.demos.tasks[int(batch["task_index"][n])]
        noise = policy.net.noise(draws[n]).view(1, 6, -1)
        theirs.reset()
        for step in range(6 if n == 0 else 1):
            action = after(theirs.select_action(before(seen), noise=noise))
            torch.testing.assert_close(action, ours[n, step][None], rtol=1e-5, atol=1e-5)


def test_the_pipelines_are_described_in_its_own_words(folder, walks, tmp_path):
    task, _, _ = task_of(*words(folder, walks))
    policy = task.model()
    task.save_pretrained(policy, tmp_path / "ours")
    config = PreTrainedConfig.from_pretrained(str(tmp_path / "ours"))
    for pipeline in make_pre_post_processors(config, dataset_stats=policy.normalizer.stats()):
        pipeline.save_pretrained(tmp_path / "theirs")
    theirs = {path.name: path for path in (tmp_path / "theirs").iterdir()}
    assert len(theirs) == 4 and theirs.keys() | {"config.json", "model.safetensors"} == {
        path.name for path in (tmp_path / "ours").iterdir()
    }
    for name, path in theirs.items():
        if path.suffix == ".json":
            assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(path.read_text())
        else:
            mine, own = load_file(tmp_path / "ours" / name), load_file(path)
            assert mine.keys() == own.keys() and all(torch.equal(mine[key], own[key]) for key in own)
