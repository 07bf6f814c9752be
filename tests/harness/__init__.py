"""What system tests share: the loads they run, and the figures they leave."""
