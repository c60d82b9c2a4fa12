"""What a statement says about a federation: who holds the data, and who is trusted with what."""

from __future__ import annotations

import math

from fedveil.data.origin import REAL, SIMULATED
from fedveil.federation.agreement import Agreement
from fedveil.privacy.guarantee import VIEWS
from fedveil.privacy.statement import Setting, Statement, statement


def stated(agreement: Agreement) -> Statement:
    """The guarantee that an agreement promises, computed here from its terms."""
    agreed, recipe = agreement, agreement.recipe
    size = (agreed.dim, agreed.units, agreed.rounds, agreed.delta)
    origin = SIMULATED if agreed.simulated else REAL
    return statement(recipe, *size, secure=True, origin=origin, setting=setting(agreed))


def setting(agreement: Agreement) -> Setting:
    """The lines of a federation."""
    lines = [("Federation", _federation(agreement))]
    if agreement.recipe.in_silos:
        lines.append(("Silos", _silos(agreement)))
    if agreement.secure_sum:
        lines.append(("Aggregation", _aggregation(agreement)))
    return tuple(lines)


def seen_by_server(agreement: Agreement) -> str:
    """What the server sees of a client that takes part."""
    if agreement.recipe.view == "messages" and not agreement.recipe.private:
        return "The server sees each of your messages, without noise."
    return {
        "models": "The server sees each of your messages without noise, and must be trusted with "
        "them. ε protects you only against others, who see the released models.",
        "messages": "The server sees each of your messages, with your own noise in it.",
        "sum": "The server sees that you take part, and the sum of all messages of a round with "
        "everybody's noise. It does not see your message.",
    }[agreement.recipe.view]


def limit(agreement: Agreement) -> float:
    """ε of the agreement in its own view."""
    found = stated(agreement).guarantees[VIEWS.index(agreement.recipe.view)].epsilon
    return found if math.isfinite(found) else math.inf


def _federation(agreement: Agreement) -> str:
    return (
        f"'{agreement.name}': {agreement.clients} clients with their own data, keys and ledgers, "
        f"agreement {agreement.hash[:16]}…. Each client refuses any other recipe and less noise. "
        "A restarted server can request rounds again. Each client charges them, up to its own ε, "
        "which then holds for it instead of the ε above. Requests are signed by the server, "
        "and nodes are authenticated by their keys."
    )


def _silos(agreement: Agreement) -> str:
    alone = "adds all of the noise to its own sum"
    shared = f"adds a share of the noise, of which {agreement.recipe.cohort.honest} are relied on"
    return (
        f"{agreement.clients} silos hold {agreement.records:,} records. Each silo clips its own "
        f"records, samples among them in secret, {shared if agreement.secure_sum else alone}, and "
        "keeps its own ledger. A record relies on its own silo for this. The server cannot check a "
        "silo's sum."
    )


def _aggregation(agreement: Agreement) -> str:
    terms, cohort = agreement.terms, agreement.cohort
    return (
        f"Bonawitz et al. 2017, against an active server: {terms.threshold} of {cohort} clients "
        f"can restore the masks of a lost client. At most {terms.corrupt} of the "
        f"{agreement.clients} clients may collude with the server. No client reveals a sum of "
        f"fewer than {terms.enough} messages. The protocol relies on the roster having the "
        "clients' own keys. An active server can abort a round, choose who takes part, leave "
        "clients out and choose the model that clients train on. One malicious client can spoil a "
        "sum."
    )
