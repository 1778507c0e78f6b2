"""Shared by every store on Redis or Valkey servers, whichever client moves the values."""
