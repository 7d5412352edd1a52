"""The config: `schema.py` declares its keys, `parse.py` reads text into it."""

from engine.config.parse import Answered as Answered
from engine.config.parse import Args as Args
from engine.config.parse import changed as changed
from engine.config.parse import defaults as defaults
from engine.config.parse import flatten as flatten
from engine.config.parse import frozen as frozen
from engine.config.parse import parse as parse
from engine.config.parse import resume_arguments as resume_arguments
from engine.config.parse import schema_of as schema_of
from engine.config.parse import task_in as task_in
from engine.config.parse import to_dict as to_dict
from engine.config.parse import to_yaml as to_yaml
from engine.config.parse import usage as usage
from engine.config.schema import ALIASES as ALIASES
from engine.config.schema import DDP as DDP
from engine.config.schema import EVERYDAY as EVERYDAY
from engine.config.schema import SETS_NOTHING as SETS_NOTHING
from engine.config.schema import SWITCHES as SWITCHES
from engine.config.schema import Config as Config
from engine.config.schema import Optim as Optim
from engine.config.schema import Schedule as Schedule
from engine.config.schema import Wandb as Wandb
from engine.config.schema import choice as choice
from engine.config.schema import option as option
from engine.config.schema import section as section
