"""Every command in a fenced block of these pages, and in a table of the README, runs: literally, with what makes it
short behind it. A command that neither these tests nor those of test_guides.py run fails a test."""

import os
import re
import shlex
import signal

import pytest
from conftest import ROOT, succeed
from test_guides import COMMANDS, SHORT_HAR, SHORT_VIDEO, assert_trained, command

TOPICS = (
    "launching",
    "larger",
    "your-own-data",
    "pretrained",
    "behaviour",
    "robots",
    "study",
    "tools",
    "publish",
    "config",
    "nothing-lost",
    "same-bits",
    "troubleshooting",
)
PAGES = ("README.md", *(f"docs/{name}.md" for name in TOPICS))
PROGRAMS = re.compile(
    r"((\w+=\S* )*)(python|torchrun|accelerate|make|srun|sbatch|pip|\./train_multigpu\.sh|\.venv/bin/python)\b"
)

TRAINED = {  # command: processes
    "./train_multigpu.sh 3 har --epochs 20": 3,
    "./train_multigpu.sh 3 --config configs/video.yaml": 3,
    "torchrun --standalone --nproc_per_node=2 train_ddp.py --config configs/har.yaml ddp.bucket_cap_mb=50": 2,
    "CUDA_VISIBLE_DEVICES=0,1,3 torchrun --standalone --nproc_per_node=3 train.py video": 3,
}

ELSEWHERE = {  # a command, or its like with files that are there and a port that is free: the test that runs it
    "python -m torch.distributed.launch --nproc_per_node=2 --master_port=29500 train.py":
        "test_the_deprecated_launch_module",
    "accelerate launch --multi_gpu --num_processes=2 train.py --config configs/har.yaml": "test_accelerate_launch",
    "NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./train_multigpu.sh har": "test_two_nodes_as_two_launchers",
    "srun --ntasks-per-node=1 ./train_multigpu.sh har": "test_what_is_started",
    "RDZV=c10d NNODES=2 MASTER_ADDR=10.0.0.1 ./train_multigpu.sh har --save-dir runs/har":
        "test_two_hosts_take_the_steps_of_one_process",
    "sbatch tools/slurm.sbatch har --epochs 20": "test_a_job_whose_time_is_over_is_requeued_and_resumes",
    "python tools/doctor.py --launch 2 har": "test_two_processes_are_started_compared_and_timed",
    "python tools/tune.py har": "test_the_largest_batch_and_a_delta_that_trains",
    "python train.py har --config tuned.yaml": "test_the_largest_batch_and_a_delta_that_trains",
    "python train.py har lr=5e-4 --force optim.lr save_dir=runs/a":
        "test_force_lets_the_keys_that_it_names_differ_and_no_other",
    "python train.py har --profile": "test_a_run_says_where_its_time_goes_and_leaves_a_trace",
    "python tools/benchmark.py --predict 8 --link 10gbit,50us har": "test_the_tables_of_the_guides",
    "python tools/index_shards.py data/texts": "test_the_index_is_verified",
    "python tools/index_shards.py data/texts --verify": "test_the_index_is_verified",
    "python train.py examples/own_text.py shards.root=https://host/texts shards.cache_gb=24":
        "test_killed_and_resumed_on_other_processes_is_the_same_run",
    "python tools/benchmark.py --predict 16 --machines 2 --inside 200gbit,10us --link 10gbit,50us har":
        "test_the_tables_of_the_guides",
    "python tools/evaluate.py RUN --split train": "test_every_split_and_data_from_elsewhere",
    "python train.py har dataset.test_subjects=3,7 save_dir=runs/har":
        "test_other_values_of_the_test_change_no_bit_of_a_training",
    "python tools/evaluate.py runs/har --split test --by subjects":
        "test_the_test_is_scored_whole_and_by_person_and_its_looks_are_counted",
    "python tools/study.py har --leave-one-out subjects --compare model.mode=conv model.mode=flatten":
        "test_a_study_from_its_folds_to_its_page",
    "python tools/study.py har --leave-one-out subjects": "test_a_study_from_its_folds_to_its_page",
    "python tools/runs.py": "test_real_runs_in_their_states",
    "python tools/predict.py RUN NEW": "test_windows_of_new_recordings_without_labels",
    "python tools/predict.py RUN --split val": "test_the_labels_of_a_split_are_those_of_its_evaluation",
    "python train.py robot 'dataset.root=[data/pick,data/place,data/push]' 'dataset.weights=[.5,.3,.2]' "
    "steps=60 eval_every=20":
        "test_killed_on_four_and_resumed_on_three_is_the_straight_run_on_one",
    "python tools/predict.py RUN data/pen --out actions.npz": "test_what_a_robot_would_do_at_each_frame",
    "python tools/prove.py mine.py": "test_a_task_without_a_mistake_passes",
    "python tools/compare.py A B": "test_other_cuts_are_told_apart_rounding_from_batch_norm",
    "python tools/replay.py RUN --all --processes 1": "test_a_run_that_was_killed_and_resumed_on_other_numbers",
    "python tools/replay.py RUN --all --jobs 2 --processes 1":
        "test_a_run_that_was_killed_and_resumed_on_other_numbers",
    "python tools/publish.py RUN --to DIR --license mit": "test_the_numbers_are_those_of_the_other_tools",
    "python tools/publish.py RUN --to shoulder-watch --license mit": "test_the_numbers_are_those_of_the_other_tools",
    "python tools/predict.py shoulder-watch NEW": "test_the_same_bytes_are_predicted",
    "python tools/provenance.py RUN": "test_the_list_is_what_the_training_has_seen",
    "python tools/compare.py one three": "test_other_cuts_are_told_apart_rounding_from_batch_norm",
    "python tools/compare.py gpu/record_step_1.npz cpu/record_step_1.npz":
        "test_records_are_compared_with_each_other_and_with_a_run",
    "python tools/report.py RUN": "test_the_numbers_are_those_of_scikit_learn_and_of_the_log",
    "python tools/report.py RUN OTHER --out both.html":
        "test_the_page_is_one_file_in_which_no_name_is_more_than_a_name",
    "python tools/provenance.py RUN --list seen.csv": "test_the_list_is_what_the_training_has_seen",
    "python train.py har device=cpu steps=45 log_every=1 digest_every=1 loss.class_weights=none exclude=sample:762":
        "test_the_same_bits_on_any_number_of_processes_and_until_the_first_of_them_comes",
    "python tools/export.py RUN": "test_the_file_says_what_the_model_says",
    "python tools/export.py RUN --format onnx": "test_the_file_says_what_the_model_says",
    "python train.py video model.name=mc3_18 model.pretrained=mc3_18-a90a0ba3.pth":
        "test_a_missing_file_ends_a_training_before_anything_is_written",
    "python train.py video model.name=mc3_18 model.pretrained=mc3_18-a90a0ba3.pth dataset.root=data/mice":
        "test_a_pretrained_backbone_is_trained_at_a_tenth_and_its_norms_keep_their_statistics",
    "python train.py video model.name=mc3_18 model.pretrained=mc3_18-a90a0ba3.pth dataset.root=data/mice "
    "model.features=cached model.views=4":
        "test_cached_features_end_in_the_same_bits_on_any_number_of_processes",
    "python train.py video model.name=mc3_18 model.pretrained=mc3_18-a90a0ba3.pth dataset.root=data/mice "
    "init_from=runs/head":
        "test_a_head_on_cached_features_is_the_start_of_fine_tuning",
    "python benchmarks/pretrained.py": "test_the_benchmark_packs_no_frame_on_both_sides",
    "python train.py examples/own_task.py": "test_a_task_of_ones_own_learns",
    "python train.py examples/own_optimizer.py": "test_an_example_learns_and_is_resumed_on_other_processes",
    "python train.py examples/own_lora.py": "test_an_example_learns_and_is_resumed_on_other_processes",
    "python train.py examples/own_text.py": "test_a_text_is_learned_on_any_processes_and_after_a_kill",
    "python examples/own_sensors.py checkpoints/own_sensors": "test_own_data_from_raw_files_to_metrics",
    "python examples/own_videos.py checkpoints/own_videos": "test_own_data_from_raw_files_to_metrics",
    "python examples/own_robot.py checkpoints/own_robot": "test_own_data_from_raw_files_to_metrics",
    "python tools/prepare_clips.py events.tsv data/mice --videos recordings --groups cages.csv":
        "test_a_clip_for_each_event",
    "python tools/prepare_tracks.py tracks data/mice.npz --labels events.tsv":
        "test_tracks_with_labels_are_trained_on_and_predicted",
    "python tools/decide.py RUN": "test_nothing_is_chosen_on_what_was_trained_on",
    "python tools/decide.py RUN data/mice.npz": "test_bouts_of_tracks_from_the_command_line",
    "python tools/predict.py RUN data/mice.npz --bouts bouts.csv --events events.tsv --boris to_boris":
        "test_bouts_of_tracks_from_the_command_line",
    "python tools/prepare_tracks.py tracks data/mice.npz --labels labels --multi":
        "test_labels_that_overlap_keep_a_column_each",
    "python train.py har dataset.root=data/mice.npz loss.kind=binary":
        "test_labels_that_overlap_from_training_to_bouts",
    "python train.py har dataset.root=data/mice.npz dataset.length=32 dataset.stride=8":
        "test_tracks_with_labels_are_trained_on_and_predicted",
    "python tools/prepare_windows.py walks.csv walks.npz": "test_a_layout_is_read_at_the_first_try",
    "python tools/prepare_windows.py walks.csv walks.npz --rate 25": "test_a_layout_is_read_at_the_first_try",
    "python tools/prepare_windows.py PAMAP2_Dataset/Protocol pamap2.npz --like pamap2":
        "test_a_layout_is_read_at_the_first_try",
    "python tools/prepare_windows.py Gun_TRAIN.tsv gun.npz": "test_cases_are_refused_padded_or_cut",
    "python train.py har dataset.root=FOLDER": "test_uci_folder",
    "python train.py examples/own_task.py table.path=mine.csv table.target=price": "test_a_task_of_ones_own_learns",
    "python train.py robot dataset.root=DIR": "test_resume_is_exact_in_the_middle_of_an_epoch",
    "python train.py examples/own_text.py text.path=mine.txt":
        "test_each_character_of_a_text_is_to_be_told_with_its_own_weight",
    "python train.py path/to/mine.py": "test_the_task_of_the_readme_trains",
    "python train.py har dataset.root=walks.npz dataset.length=128 dataset.stride=64":
        "test_what_is_prepared_is_trained_on",
    "python tools/prepare_clips.py trials.csv data/mice --videos recordings --frames 17 --size 256":
        "test_own_data_from_raw_files_to_metrics",
    "./train_multigpu.sh --config configs/video.yaml dataset.root=data/mice": "test_own_data_from_raw_files_to_metrics",
    "torchrun --standalone --nproc_per_node=2 train_ddp.py --config configs/policy/act.yaml dataset.root=DIR "
    "batch_size=8":
        "test_the_guides_commands_train",
    "python tools/evaluate.py RUN eval.n_episodes=100":
        "test_evaluate_gives_the_same_numbers_on_any_number_of_processes",
    "python train.py robot --policy.path=lerobot/smolvla_base --dataset.repo_id=me/cubes --download":
        "test_what_is_not_here_is_downloaded_where_that_is_asked_for",
    "python train.py robot --policy.type=diffusion --dataset.repo_id=me/cubes --policy.use_group_norm=true":
        "test_it_trains_on_one_and_two_processes_makes_trials_and_is_saved",
    "python train.py robot --policy.path=FOLDER dataset.root=DIR "
    "--rename_map='{\"observation.images.front\": \"observation.images.camera1\"}'":
        "test_renamed_observations_train_as_if_they_were_recorded_so_and_are_renamed_on_the_robot",
    "python tools/save_pretrained.py RUN": "test_a_run_becomes_a_pretrained_policy_for_the_next",
}  # fmt: skip


def shown():
    """{command: page} of all fenced blocks, and of the tables of the README."""
    found = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        if page == "README.md":
            rows = re.findall(r"^\|.*\|$", text, re.M)
            lines += [words for row in rows for words in re.findall(r"`([^`]+)`", row)]
        for line in lines:
            if PROGRAMS.match(line):
                found.setdefault(re.sub(r"\s+#.*", "", line), page)
    return found


def in_the_guides(words):
    """Return whether test_guides.py has the command, with nothing but settings behind it."""
    found = (line.removeprefix(f"{words} ") for _, line in COMMANDS if line.startswith(f"{words} "))
    return any(all("=" in more for more in rest.split()) for rest in found)


PLANS = {  # command: how many lines of its plan are shown
    "python train.py har --dry-run global_batch=256 batch_size=64": 7,
    "torchrun --standalone --nproc_per_node=3 train.py har --dry-run virtual_workers=8": 3,
}

HERE = {
    "make train",
    "make test",
    "./train_multigpu.sh --print 2 har",
    *PLANS,
    "python train.py har epoch=3 --lr abc optim.wieght_decay=0",
}
"""The tests below run these, and those of `the_proof`."""


def the_proof():
    """The commands that end in one hash; those with a folder are one run, killed twice."""
    return [words for words in shown() if "virtual_workers=4 model.dropout" in words]


def test_no_command_is_left_out():
    known = {*TRAINED, *HERE, *the_proof(), *ELSEWHERE}
    left_out = {words: page for words, page in shown().items() if words not in known and not in_the_guides(words)}
    assert not left_out, "run them here, or say why not"
    assert known <= shown().keys(), "no page shows these any more"
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in ELSEWHERE.values() if f"def {name}(" not in tests]


@pytest.mark.slow
@pytest.mark.parametrize("words", TRAINED)
def test_a_command_trains(launch, tmp_path, words):
    short = SHORT_VIDEO if "video" in words else SHORT_HAR
    settings = dict(re.findall(r"(\w+)=(\S*) ", PROGRAMS.match(words)[1]))
    line = f"{words.removeprefix(PROGRAMS.match(words)[1])} {short}"
    assert_trained(launch(*command(line, tmp_path), **settings), tmp_path, TRAINED[words])


@pytest.mark.slow
def test_all_end_in_the_same_bits(launch, tmp_path):
    """Small batches, with three times the stride; a rank is killed at step 6, and at step 12."""
    hashes, kills = [], 2
    for words in the_proof():
        line, _, folder = words.partition(" save_dir=")
        line += " dataset.stride=192 batch_size=8 epochs=1 log_every=2 save_every=2"
        run = launch.start(*command(line, tmp_path / (folder or str(len(hashes)))))
        if folder and kills:
            run.wait_for(f"step {6 * (3 - kills)}/")  # then an earlier checkpoint is whole
            os.kill(launch.rank_pid(1), signal.SIGKILL)
            assert run.wait().code and "sha256" not in run.said()
            kills -= 1
            continue
        done = succeed(run.wait())
        assert ("Resuming" in done.out) == bool(folder)
        hashes.append(re.search(r"weights +sha256 (\w+)", done.out)[1])
    assert len(hashes) == 3 and len(set(hashes)) == 1


def test_make_starts_what_it_says(launch):
    make = ("make", "-n", "-B", "--no-print-directory")
    train, test, gpu = (succeed(launch(*make, target)).out for target in ("train", "test", "gpu"))
    assert "./train_multigpu.sh" in train and "pip install" in train and "requirements.txt" in train
    assert "-m pytest -n " in test and "requirements-dev.txt" in test
    assert "-m pytest -m gpu" in gpu and "requirements-dev.txt" in gpu


def test_the_launcher_prints_its_command(launch):
    done = succeed(launch("./train_multigpu.sh", "--print", "2", "har"))
    assert "--nproc_per_node=2" in done.out and shlex.split(done.out)[-2].endswith("/train.py")


def blocks_after(words):
    """The lines that a page shows behind a command."""
    text = (ROOT / shown()[words]).read_text()
    return text.split(f"$ {words}\n")[1].split("```")[0].splitlines()


def test_mistakes_are_told_as_shown(launch):
    words = "python train.py har epoch=3 --lr abc optim.wieght_decay=0"
    done = launch.python(*shlex.split(words)[1:])
    assert done.code == 2 and done.errors == blocks_after(words)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "lines"), PLANS.items())
def test_the_arithmetic_is_as_shown(launch, tmp_path, words, lines):
    done = succeed(launch(*command(words, tmp_path)))
    expected = [line for line in blocks_after(words) if not line.startswith(("  precision", "  device"))]
    assert len(expected) == lines and not [line for line in expected if line not in done.out.splitlines()]
