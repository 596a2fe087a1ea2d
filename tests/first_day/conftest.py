"""The briefly warmed checkpoint that the pages' commands train."""

from tests.integration.conftest import brief_checkpoint as brief_checkpoint
