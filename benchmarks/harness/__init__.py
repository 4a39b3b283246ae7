"""What the questions share: interleaved rounds, raw limits, peers, states, and the document that each one prints."""
