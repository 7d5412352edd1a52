"""The files of tracks as DeepLabCut and SLEAP leave them in a folder: one file of each video, all parts or some."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from lab_files import RecordingCase, cases

from formats.lab import behaviour, tracks
from tools.lab import prepare_tracks

FILES = {case.folder.name: case for case in cases("tracks", RecordingCase)}
SCORER = "DLC_resnet50_miceMay6shuffle1_100000"
PARTS = ("nose", "body_centre", "tail_base")


def positions(shift: float = 0.0, count: int = 12) -> np.ndarray:
    """Return (N, 3, 2): three parts in a line that moves; `shift` tells files apart."""
    frames = np.arange(count, dtype=float)
    parts = [np.stack([frames + 10 * p + shift, 2 * frames], 1) for p in (2, 1, 0)]
    return np.stack(parts, 1)


def write_csv(path: Path, scorer: str = SCORER, shift: float = 0.0, corners: str = "", animal: str = "") -> Path:
    """Write a CSV of DeepLabCut, with individuals if an animal or the individual of the corners is named."""
    columns = [(animal, part) for part in PARTS]
    xy = positions(shift)
    if corners:
        columns += [(corners, "corner_left"), (corners, "corner_right")]
        xy = np.concatenate([xy, np.full((len(xy), 2, 2), 7.0)], 1)
    names = {"scorer": [scorer] * len(columns), "individuals": [a for a, _ in columns]}
    names["bodyparts"] = [part for _, part in columns]
    if not animal:
        del names["individuals"]
    lines = [",".join([key, *(name for each in values for name in [each] * 3)]) for key, values in names.items()]
    lines.append("coords" + ",x,y,likelihood" * len(columns))
    for frame, row in enumerate(xy):
        lines.append(",".join([str(frame), *(f"{x},{y},1" for x, y in row)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


class Done(NamedTuple):
    code: int
    out: str
    err: str
    recordings: list[str]
    channels: list[str]


@pytest.fixture
def prepare(tmp_path, capsys):
    def run(path: Path, *options: object) -> Done:
        out = tmp_path / f"out{len([*tmp_path.glob('out*')])}.npz"
        code = prepare_tracks.main([*map(str, [path, out, "--fps", 20, *options])])
        if code:
            assert not out.exists()
            return Done(code, *capsys.readouterr(), [], [])
        made = np.load(out)
        return Done(code, *capsys.readouterr(), made["recording"].tolist(), made["channels"].tolist())

    return run


# ---- names -----------------------------------------------------------------------------------------------------------

NAMES = {
    "EPM_15DeepCut_resnet50_epmMay17shuffle1_1030000": ("DeepCut_resnet50_epmMay17shuffle1_1030000", "EPM_15"),
    "m1DLC_resnet50_miceMay6shuffle1_100000_filtered": (SCORER, "m1"),
    "m1DLC_dlcrnetms5_miceMay6shuffle1_100000_el_filtered": ("DLC_dlcrnetms5_miceMay6shuffle1_100000", "m1"),
    "m1DLC_HrnetW32_miceMay6shuffle1_snapshot_200": ("DLC_HrnetW32_miceMay6shuffle1_snapshot_200", "m1"),
    "DLC_test_1DLC_resnet50_miceMay6shuffle1_100000": (SCORER, "DLC_test_1"),
    "m1_superanimal_quadruped_hrnetw32": ("superanimal_quadruped_hrnetw32", "m1"),
    "m1_superanimal_topviewmouse_snapshot": ("another", "m1"),
    "renamed": (SCORER, "renamed"),
}


@pytest.mark.parametrize("stem", NAMES)
def test_the_video_of_a_file_of_deeplabcut(tmp_path, stem):
    scorer, video = NAMES[stem]
    path = write_csv(tmp_path / f"{stem}.csv", scorer)
    assert tracks.video_of(path) == video and tracks.read(path)[0].video == video


def test_the_video_of_a_file_of_sleap(tmp_path):
    path = tmp_path / "labels.v001.000_mouse_7.analysis.csv"
    path.write_text("track,frame_idx,nose.x,nose.y\n,0,1,2\n")
    assert tracks.video_of(path) == tracks.read(path)[0].video == "mouse_7"


# ---- one file of each video ------------------------------------------------------------------------------------------


def test_filtered_tracks_beside_the_raw_ones_are_one_video(tmp_path, prepare):
    folder = tmp_path / "tracks"
    for video in ("m1", "m2"):
        write_csv(folder / f"{video}{SCORER}.csv")
        write_csv(folder / f"{video}{SCORER}_filtered.csv", shift=0.25)
    write_csv(folder / f"m3{SCORER}.csv")
    done = prepare(folder)
    says = rf"error: m1{SCORER}.csv and m1{SCORER}_filtered.csv are both tracks of m1 \(.*\): --prefer filtered takes"
    assert done.code == 2 and re.search(says, done.err), done.err
    for name, other in (("filtered", ""), ("raw", "_filtered")):
        done = prepare(folder, "--prefer", name)
        assert done.code == 0 and done.recordings == ["m1", "m2", "m3"], done.err
        assert f"not used: m1{SCORER}{other}.csv" in done.out
        assert (f"note: m3 has no file filtered: m3{SCORER}.csv is used" in done.out) == (name == "filtered")
    files, _ = tracks.one_of_each_video(tracks.sources_of(folder), folder, ["filtered"])
    assert tracks.read(files[0].path)[0].xy[0, 0, 0] == 20.25


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_tracks_that_a_spreadsheet_has_saved(tmp_path, prepare, separator, mark):
    """Decimal commas, another separator, in a folder and alone."""
    plain = write_csv(tmp_path / f"plain/m1{SCORER}.csv", shift=0.25)
    lines = plain.read_text().replace(",", separator).replace(".", ",")
    path = tmp_path / "tracks" / plain.name
    path.parent.mkdir()
    path.write_text(mark + lines)
    assert (tracks.read(path)[0].xy == tracks.read(plain)[0].xy).all()
    for each in (path, path.parent):
        done = prepare(each)
        assert done.code == 0 and done.recordings == ["m1"], done.err


def test_tracks_of_two_snapshots_are_one_video(tmp_path, prepare):
    folder = tmp_path / "tracks"
    for steps in ("50000", "150000"):
        write_csv(folder / f"m1{SCORER.replace('100000', steps)}.csv")
    done = prepare(folder)
    assert done.code == 2 and re.search(r"are both tracks of m1 \(.*--prefer 50000 takes the second one", done.err)
    assert f"m1: m1{SCORER.replace('100000', '50000')}.csv; not used" in prepare(folder, "--prefer", "50000").out
    for steps in ("50000", "150000"):
        write_csv(folder / f"m1{SCORER.replace('100000', steps)}_filtered.csv")
    assert "150000_filtered.csv; not used: " in prepare(folder, "--prefer", "filtered,150000").out
    assert prepare(folder, "--prefer", "filtered").code == 2
    shutil.copytree(folder, tmp_path / "two/copy")
    shutil.copytree(folder, tmp_path / "two/same")
    assert "are both tracks of m1 (4 files)" in prepare(tmp_path / "two", "--prefer", "filtered").err


def test_a_folder_as_deeplabcut_leaves_it(tmp_path, prepare):
    """CSV and .h5 of the same numbers, pickles, the lengths of bones, labels of frames."""
    folder = tmp_path / "tracks"
    folder.mkdir()
    for name in ("deeplabcut", "deeplabcut_h5"):
        shutil.copy(FILES[name].path, folder)
    stem = FILES["deeplabcut"].path.stem
    for ending in ("_meta.pickle", "_full.pickle", "_skeleton.csv", "_skeleton.h5", "_labeled.mp4"):
        (folder / f"{stem}{ending}").write_bytes(b"x")
    labels = "".join(f"{n},{int(n < 20)},{int(n >= 20)}\n" for n in range(40))
    (folder / "a_labels.csv").write_text(f",background,groom\n{labels}")
    done = prepare(folder, "--labels", folder)
    assert done.code == 0 and done.recordings == ["a"], done.err
    assert "give the .h5 or the CSV" in prepare(folder / f"{stem}_meta.pickle").err
    (folder / f"{stem}.csv").unlink()
    pytest.importorskip("h5py")
    again = prepare(folder, "--labels", folder)
    assert again.recordings == ["a"] and again.channels == done.channels, again.err


# ---- .h5 and CSV -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deeplabcut_h5", "deeplabcut_h5_fixed", "deeplabcut_h5_two_animals"])
def test_the_h5_holds_what_the_csv_holds(name):
    """pandas wrote these files from the CSV, as a table (format="table") and as a fixed frame."""
    (of_csv,) = FILES[re.sub("_h5(_fixed)?", "", name)].path.parent.iterdir()
    for one, other in zip(tracks.read(FILES[name].path), tracks.read(of_csv), strict=True):
        assert (one.video, one.animal, one.parts) == (other.video, other.animal, other.parts)
        assert np.array_equal(one.xy, other.xy, equal_nan=True) and (one.likelihood == other.likelihood).all()


def edited_h5(path: Path, names: bytes = b"", skipped: int = 0) -> Path:
    """Copy a table of pandas with other names of the columns, or without a frame."""
    h5py = pytest.importorskip("h5py")
    shutil.copy(FILES["deeplabcut_h5"].path, path)
    with h5py.File(path, "r+") as file:
        table = file["df_with_missing/table"]
        rows = table[()]
        rows["index"][5:] += skipped
        table[...] = rows
        if names:
            table.attrs["values_block_0_kind"] = np.bytes_(names)
    return path


H5_FAULTS = {
    "code": (b"cos\nsystem\n(S'touch hacked'\ntR.", 0, r"os.system in the names of the columns \(.*.h5\): export the"),
    "no names": (b"(lp0\n", 0, r"no table of DeepLabCut: .*\(.*.h5\): export the CSV"),
    "bones": (b"(lp0\n(Vbone\nVlength\ntp1\na.", 0, r"\[2\] rows of names above the columns \(.*.h5\): DeepLabCut's"),
    "a frame": (b"", 1, r"rows that are not the frames 0, 1, 2, ... \(.*.h5\): give the track of a whole"),
}


@pytest.mark.parametrize("case", H5_FAULTS.values(), ids=H5_FAULTS)
def test_another_h5_is_refused_and_no_code_of_it_runs(tmp_path, prepare, case):
    """The names of the columns are a pickle in an attribute."""
    names, skipped, says = case
    done = prepare(edited_h5(tmp_path / f"a{SCORER}.h5", names, skipped))
    assert done.code == 2 and re.search(says, done.err) and done.err.count("\n") == 1, done.err


def test_the_axes_of_sleap_are_told_apart(tmp_path):
    """Seven frames of two animals with two nodes: (7, 2, 2, 2) fits both orders of the axes."""
    h5py = pytest.importorskip("h5py")
    xy = np.arange(7 * 2 * 2 * 2, dtype=float).reshape(7, 2, 2, 2)  # frames, animals, nodes, x and y
    for name, attribute in (("named.h5", '["frame", "track", "node", "xy"]'), ("counted.h5", "")):
        with h5py.File(tmp_path / name, "w") as file:
            file["tracks"], file["node_names"] = xy, [b"nose", b"tail"]
            file["track_names"] = [] if attribute else [b"m1", b"m2"]
            if attribute:
                file["tracks"].attrs["dims"] = attribute
        found = tracks.read(tmp_path / name)
        assert [one.xy.tolist() for one in found] == [xy[:, 0].tolist(), xy[:, 1].tolist()]


CSV_HEAD = "track,frame_idx,instance.score,nose.x,nose.y,nose.score,tail_base.x,tail_base.y,tail_base.score\n"


def test_frames_without_an_animal_are_missing_in_sleaps_csv(tmp_path):
    path = tmp_path / "m1.analysis.csv"
    path.write_text(CSV_HEAD + "track_0,3,.9,1,2,.5,3,4,\ntrack_0,0,.9,5,6,.7,,,\n")
    (track,) = tracks.read(path)
    assert track.parts == ["nose", "tail_base"] and track.animal == "" and len(track.xy) == 4
    assert track.xy[[0, 3], 0].tolist() == [[5, 6], [1, 2]] and np.isnan(track.xy[1:3]).all()
    assert track.likelihood.tolist() == [[0.7, 0], [0, 0], [0, 0], [0.5, 1]]  # a point placed by hand has no score


SLEAP_FAULTS = {
    "two animals": (CSV_HEAD + ",0,.9,1,2,1,3,4,1\n,0,.9,1,2,1,3,4,1\n", r"a second animal in frame 0 \(.*:3\): track"),
    "a word": (CSV_HEAD + ",0,.9,left,2,1,3,4,1\n", r"not a number or nothing in each cell \(.*csv:2\)"),
    "no y": ("track,frame_idx,nose.x\n,0,1\n", r"nose has no y \(.*csv:1\)"),
    "one row": ("frame_idx,m1.track,m1.nose.x,m1.nose.y\n0,,1,2\n", r"all animals of a frame in one row \(.*csv:1\)"),
    "two videos": ("video,frame_idx,nose.x,nose.y\na,0,1,2\nb,1,1,2\n", r"a second video \(.*csv:3\)"),
    "no rows": ("track,frame_idx,nose.x,nose.y\n", r"no frames \(.*csv\)"),
}


@pytest.mark.parametrize("case", SLEAP_FAULTS.values(), ids=SLEAP_FAULTS)
def test_another_csv_of_sleap_is_refused(tmp_path, prepare, case):
    text, says = case
    (tmp_path / "m.csv").write_text(text)
    done = prepare(tmp_path / "m.csv")
    assert done.code == 2 and re.search(says, done.err), done.err


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_parts_are_left_out(tmp_path, prepare):
    path = write_csv(tmp_path / "m1.csv", corners="m1", animal="m1")
    assert "corner_left_x" in prepare(path).channels
    plain = prepare(write_csv(tmp_path / "plain/m1.csv"))
    for parts in ("nose,body_centre,tail_base", "nose,body*,tail*"):
        assert prepare(path, "--parts", parts).channels == plain.channels
    assert re.search(r"no part beak \(.*m1.csv\): the file has nose, body_", prepare(path, "--parts", "beak").err)


def test_the_parts_of_no_animal_are_no_animal(tmp_path, prepare):
    """DeepLabCut's individual `single` holds unique parts, such as the corners of a maze."""
    done = prepare(write_csv(tmp_path / "m1.csv", corners="single", animal="m1"))
    assert done.code == 0 and done.recordings == ["m1"], done.err
    assert "of no animal: corner_left, corner_right" in done.out
    assert done.channels == prepare(write_csv(tmp_path / "plain/m1.csv")).channels
    (alone,) = tracks.read(write_csv(tmp_path / "alone.csv", animal="single"))
    assert alone.parts == [*PARTS]


def test_labels_may_name_the_file_of_deeplabcut(tmp_path):
    """A published table of events names the CSV of the tracks in place of the video."""
    assert behaviour.stem_of(f"EPM_15{SCORER.replace('DLC', 'DeepCut')}.csv") == "EPM_15"
    assert behaviour.stem_of("C:\\videos\\a.b.mp4") == "a.b" and behaviour.stem_of("DLC_a.mp4") == "DLC_a"
