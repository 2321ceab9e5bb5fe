"""The messages between rooms, as msgspec structs: requests and plans go down, results and news come up."""
