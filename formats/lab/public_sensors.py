"""Public sets of sensor recordings in their published form.

The module has columns, labels and people of each set, as options of tools/prepare_windows.py. No
data are shipped; each set has its own licence.

    pamap2       PAMAP2_Dataset/Protocol: subject10N.dat, 54 columns, 100 Hz (CC BY 4.0)
    wisdm        WISDM_ar_v1.1_raw.txt: user,activity,time,x,y,z; 20 Hz, m/s2
    opportunity  OpportunityUCIDataset/dataset: S1-ADL1.dat, 250 columns, 30 Hz, milli g (CC BY 4.0)
    capture24    capture24: P001.csv.gz and annotation-label-dictionary.csv, 100 Hz, g (CC BY 4.0)
"""

from __future__ import annotations

from typing import Any


def _axes(*sensors: str) -> list[str]:
    return [f"{sensor}_{axis}" for sensor in sensors for axis in "xyz"]


_IMU = ["temperature", *_axes("acc16", "acc6", "gyro", "mag"), "q0", "q1", "q2", "q3"]
_PAMAP2 = [
    "time",
    "activity",
    "heart_rate",
    *(f"{place}_{what}" for place in ("hand", "chest", "ankle") for what in _IMU),
]
_ACTIVITIES = """1=lying,2=sitting,3=standing,4=walking,5=running,6=cycling,7=nordic walking,
9=watching TV,10=computer work,11=car driving,12=ascending stairs,13=descending stairs,
16=vacuum cleaning,17=ironing,18=folding laundry,19=house cleaning,20=playing soccer,
24=rope jumping"""

_JACKET = [*_axes("acc", "gyro", "mag"), "q1", "q2", "q3", "q4"]
# numbers as in its column_names.txt
_OPPORTUNITY = ["time", *(f"column_{n}" for n in range(2, 38))]
_OPPORTUNITY += [
    f"{place}_{what}" for place in ("back", "rua", "rla", "lua", "lla") for what in _JACKET
]
_OPPORTUNITY += [f"column_{n}" for n in range(103, 244)]
_OPPORTUNITY += "locomotion activity left_arm left_object right_arm right_object gesture".split()

LIKE: dict[str, dict[str, Any]] = {
    "pamap2": {
        "files": "*.dat",
        "columns": ",".join(_PAMAP2),
        "channels": "*_acc16_*,*_gyro_*",
        "label": "activity",
        "label_map": _ACTIVITIES,
        "exclude_label": "0",
        "file_subject": r"subject(\d+)",
        "missing": "fill",
    },
    "wisdm": {
        "files": "*_raw.txt",
        "columns": "user,activity,time,x,y,z",
        "time_unit": "ns",
        "bad_lines": "skip",
    },
    "opportunity": {
        "files": "S*.dat",
        "columns": ",".join(_OPPORTUNITY),
        "channels": "*_acc_*,*_gyro_*",
        "time_unit": "ms",
        "label": "locomotion",
        "label_map": "1=stand,2=walk,4=sit,5=lie",
        "exclude_label": "0",
        "file_subject": r"S(\d+)-",
        "missing": "fill",
    },
    "capture24": {
        "files": "P[0-9]*.csv*",
        "channels": "x,y,z",
        "time_unit": "datetime",
        "label": "annotation",
        "label_map": "annotation-label-dictionary.csv:label:Willetts2018",
        "file_subject": r"(P\d+)",
    },
}
"""Options of each set; options of the command line have priority."""
