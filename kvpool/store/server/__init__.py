"""What every store on Redis or Valkey servers shares, whichever client moves its values."""
