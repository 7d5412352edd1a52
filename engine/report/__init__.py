"""The output of a run: the log, TensorBoard, how a run opens and ends."""

from engine.report.open_log import already_complete as already_complete
from engine.report.open_log import open_log as open_log
from engine.report.step_metrics import log_metrics as log_metrics
