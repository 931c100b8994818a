"""The version: here and nowhere else, so that a bare checkout and every room have it."""

VERSION = "0.2.0"
