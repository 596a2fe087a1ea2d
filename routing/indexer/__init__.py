"""Positions that indexers of sparse attention choose: record, sets as bits, replay in transformers' models, proof."""
