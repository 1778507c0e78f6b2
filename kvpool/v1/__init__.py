"""The messages of the index's protocol, generated from ``protos/kvpool/v1/index.proto`` by ``make proto``."""
