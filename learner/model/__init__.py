"""The networks: loaded, sharded, adapted, and computed without whole logits."""
