"""Runs on Cloud Storage that were not heard of for a while."""

import dataclasses

from pipeline.results.claims_cloud import CloudClaims


def fall_silent(output: str, seconds: float = 310.0) -> None:
    """Makes all records as old as those of machines that were not heard of for this time."""

    def as_old(claims, now):
        return {run: dataclasses.replace(claim, renewed=now - seconds, life="elsewhere") for run, claim in claims.items()}

    CloudClaims(output)._change(as_old)
