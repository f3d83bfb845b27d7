"""What a user asks for, checked before anything is made."""

from penstock.config.configuration import Configuration as Configuration
from penstock.config.configuration import ConfigurationError as ConfigurationError
