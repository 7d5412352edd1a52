"""Signed messages between ranks, few listening interfaces, and an inspection of checkpoint files
before torch reads a file."""

from __future__ import annotations

from engine import hooks
from plugins.security.agent import before_agent
from plugins.security.handshake import before_rendezvous, shake_hands
from plugins.security.inspect import check_archive
from plugins.security.sign import SignedExchange

hooks.before_agent.add(before_agent)
hooks.before_rendezvous.add(before_rendezvous)
hooks.handshakes.add(shake_hands)
hooks.exchanges.add(SignedExchange)
hooks.before_read.add(check_archive)
