"""What every other part stands on; imports nothing of specjax but itself."""
