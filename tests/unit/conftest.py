"""For the tests of parts."""

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
