"""Reads KubeSchedulerConfiguration, the file of --config, as kube-scheduler and Koordinator do.

apiVersion kubescheduler.config.k8s.io/v1. Reading is strict: an unknown field, plugin or value is
an error, every error names its field (profiles[0].plugins.score.enabled[1].weight), and all errors
of a file are reported together. A file is used as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import field
from msgspec.structs import replace

from apis.decode import without_nulls
from apis.errors import InputError, InputErrors
from cluster.scheduler.configuration.arguments import AtLeastOne, NotNegative64, Percent
from cluster.scheduler.configuration.configuration import (
    DEFAULT_SCHEDULER_NAME,
    ClientConnection,
    LeaderElection,
    SchedulerConfiguration,
    lease_problems,
)
from cluster.scheduler.configuration.extenders import ignored_resources, read_extenders
from cluster.scheduler.configuration.plugin_arguments import ARGUMENTS, Arguments, arguments
from cluster.scheduler.configuration.points import PLUGINS, REMOVED
from cluster.scheduler.configuration.profiles import Plugins, Profile, check_names, meant, merge
from cluster.scheduler.configuration.strict import Problems, Section, read
from service.manifest import NotYaml, document

GROUP_VERSION: Final = "kubescheduler.config.k8s.io/v1"
KIND: Final = "KubeSchedulerConfiguration"

LARGEST_FILE: Final = 1 << 20
"""Characters; chosen: an object of the API server, from which files are mounted, has at most 1.5
MiB, and a file with 100 profiles like the chart's has 0.4 MiB."""
_MOST_VALUES: Final = 50_000
"""Mappings, lists and scalars; chosen: five times what 100 profiles like the chart's have."""


class ProfileSection(Section, frozen=True):
    """An element of `profiles`; the plugins and each pluginConfig are read on their own."""

    scheduler_name: str = ""
    percentage_of_nodes_to_score: Percent | None = None
    plugins: Any = None
    plugin_config: tuple[Any, ...] = ()


class PluginConfig(Section, frozen=True):
    """An element of `pluginConfig`; the arguments' type follows from the name."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


class File(Section, frozen=True):
    """The whole file. Elements of `profiles` and `extenders` are read on their own."""

    api_version: str
    kind: str
    client_connection: ClientConnection = ClientConnection()
    leader_election: LeaderElection = LeaderElection()
    parallelism: AtLeastOne = 16
    percentage_of_nodes_to_score: Percent = 0
    pod_initial_backoff_seconds: NotNegative64 = 1
    pod_max_backoff_seconds: NotNegative64 = 10
    enable_profiling: bool = True
    enable_contention_profiling: bool = True
    delay_cache_until_active: bool = False
    profiles: tuple[Any, ...] = ()
    extenders: tuple[Any, ...] = ()


_ALL_NODES: Final = "all nodes are evaluated in every cycle"
_NO_PROFILES: Final = "there is no profile of Go's runtime to serve"
_JSON: Final = "the API server is asked for JSON"
_IDLE: Final[Mapping[tuple[str, ...], str]] = {
    ("parallelism",): _ALL_NODES,
    ("percentageOfNodesToScore",): _ALL_NODES,
    ("enableProfiling",): _NO_PROFILES,
    ("enableContentionProfiling",): _NO_PROFILES,
    ("clientConnection", "contentType"): _JSON,
    ("clientConnection", "acceptContentTypes"): _JSON,
}
"""Fields that are read without effect -> why."""


def default_configuration() -> SchedulerConfiguration:
    """Return the configuration of a process without a file: kube-scheduler's plugins alone."""
    return read_configuration(f"apiVersion: {GROUP_VERSION}\nkind: {KIND}", obj="defaults")


def read_configuration(text: str, *, obj: str) -> SchedulerConfiguration:
    """Return the configuration that the YAML or JSON `text` spells.

    obj: the file's name, for errors. Raises InputErrors with everything that is wrong.
    """
    problems = Problems(obj)
    configuration = _configuration(_tree(text, obj), problems)
    if configuration is None or problems.errors:
        raise InputErrors(problems.errors)
    return configuration


def _tree(text: str, obj: str) -> dict[str, Any]:
    def refused(problem: str, value: object = text[:64]) -> InputErrors:
        error = InputError(obj=obj, field="(whole file)", value=value, problem=problem)
        return InputErrors([error])

    if len(text) > LARGEST_FILE:
        raise refused(f"longer than {LARGEST_FILE} characters")
    try:
        tree = document(text, most_values=_MOST_VALUES)
    except NotYaml as error:
        raise refused(str(error)) from None
    if not isinstance(tree, dict):
        raise refused(f"expected a {KIND}", "" if tree is None else tree)
    plain: dict[str, Any] = without_nulls(tree)
    for name, wanted in (("apiVersion", GROUP_VERSION), ("kind", KIND)):
        if plain.get(name) != wanted:
            other = InputError(
                obj=obj,
                field=name,
                value=plain.get(name, "(absent)"),
                problem=f"expected {wanted}",
                hint=(
                    "the file stands in the data of this ConfigMap: mount it, and name the file"
                    if plain.get("kind") == "ConfigMap"
                    else "nothing else of the file was read"
                ),
            )
            raise InputErrors([other])
    return plain


def _configuration(tree: dict[str, Any], problems: Problems) -> SchedulerConfiguration | None:
    file = read(tree, File, problems)
    notices = [
        f"{'.'.join(path)} has no effect: {why}" for path, why in _IDLE.items() if _has(tree, path)
    ]
    # The parts are read from the tree, so that they are checked even if the frame has errors.
    extenders = read_extenders(_list(tree, "extenders"), problems.below("extenders"))
    ignored = ignored_resources(extenders)
    given = _list(tree, "profiles") or [{}]
    profiles = []
    for index, each in enumerate(given):
        if problems.full:
            break
        at = problems.below("profiles", index)
        profile = _profile(each, at, notices, ignored)
        if profile is not None:
            profiles.append(profile)
    _check_scheduler_names(given, problems)
    if file is None:
        return None
    client, lease = _client(file.client_connection), _lease(file.leader_election)
    for name, value, problem in lease_problems(lease):
        problems.add(("leaderElection", name), value, problem)
    _check_backoff(file, problems)
    return SchedulerConfiguration(
        client_connection=client,
        leader_election=lease,
        parallelism=file.parallelism,
        percentage_of_nodes_to_score=file.percentage_of_nodes_to_score,
        pod_initial_backoff_seconds=file.pod_initial_backoff_seconds,
        pod_max_backoff_seconds=file.pod_max_backoff_seconds,
        enable_profiling=file.enable_profiling,
        enable_contention_profiling=file.enable_contention_profiling,
        delay_cache_until_active=file.delay_cache_until_active,
        profiles=tuple(profiles),
        extenders=extenders,
        notices=tuple(notices),
    )


def _has(tree: Any, path: tuple[str, ...]) -> bool:
    for step in path:
        if not isinstance(tree, dict) or step not in tree:
            return False
        tree = tree[step]
    return True


def _list(tree: Mapping[str, Any], name: str) -> list[Any]:
    found = tree.get(name)
    return found if isinstance(found, list) else []


# --- process -------------------------------------------------------------------------------------


def _client(given: ClientConnection) -> ClientConnection:
    """Fill in the defaults of what is zero, which Go cannot tell from absent."""
    defaults = ClientConnection()
    return replace(
        given,
        content_type=given.content_type or defaults.content_type,
        qps=given.qps or defaults.qps,
        burst=given.burst or defaults.burst,
    )


def _lease(given: LeaderElection) -> LeaderElection:
    """Fill in the defaults as `_client` does."""
    defaults = LeaderElection()
    return replace(
        given,
        lease_duration=given.lease_duration or defaults.lease_duration,
        renew_deadline=given.renew_deadline or defaults.renew_deadline,
        retry_period=given.retry_period or defaults.retry_period,
        resource_lock=given.resource_lock or defaults.resource_lock,
        resource_name=given.resource_name or defaults.resource_name,
        resource_namespace=given.resource_namespace or defaults.resource_namespace,
    )


def _check_backoff(file: File, problems: Problems) -> None:
    initial, most = file.pod_initial_backoff_seconds, file.pod_max_backoff_seconds
    if initial == 0:
        problems.add(("podInitialBackoffSeconds",), initial, "expected a whole number, 1 or more")
    if most < initial:
        problems.add(
            ("podMaxBackoffSeconds",),
            most,
            f"must not be less than podInitialBackoffSeconds, which is {initial}",
        )


# --- profiles ------------------------------------------------------------------------------------


def _profile(
    tree: Any, problems: Problems, notices: list[str], ignored: tuple[str, ...]
) -> Profile | None:
    """ignored: resources that extenders manage."""
    section = read(tree, ProfileSection, problems)
    if not isinstance(tree, dict):
        return None
    at = problems.below("plugins")
    before = len(problems.errors)
    plugins = None
    if "plugins" in tree:
        plugins = read(tree["plugins"], Plugins, at)
        check_names(tree["plugins"], at)
    merged = merge(plugins, at) if len(problems.errors) == before else None
    given = _plugin_arguments(_list(tree, "pluginConfig"), problems.below("pluginConfig"), notices)
    if plugins is not None:
        _note_left_out(plugins, problems.at, notices)
    if "percentageOfNodesToScore" in tree:
        notices.append(f"{problems.at}.percentageOfNodesToScore has no effect: {_ALL_NODES}")
    if section is None or merged is None:
        return None
    return Profile(
        scheduler_name=section.scheduler_name or DEFAULT_SCHEDULER_NAME,
        plugins=merged.plugins,
        score_weights=merged.score_weights,
        arguments=_with_ignored(arguments(given), ignored),
        percentage_of_nodes_to_score=section.percentage_of_nodes_to_score,
    )


def _note_left_out(plugins: Plugins, at: str, notices: list[str]) -> None:
    named = {
        entry.name
        for member in plugins.__struct_fields__
        for entry in getattr(plugins, member).enabled
    }
    for name in sorted(named & PLUGINS.keys()):
        if PLUGINS[name].left_out:
            notices.append(
                f"{at}.plugins: {name} is left out of this scheduler: {PLUGINS[name].left_out}"
            )


def _with_ignored(complete: Arguments, ignored: tuple[str, ...]) -> Arguments:
    fit = complete.node_resources_fit
    both = tuple(dict.fromkeys((*fit.ignored_resources, *ignored)))
    fit = replace(fit, ignored_resources=both)
    return replace(complete, node_resources_fit=fit)


def _check_scheduler_names(given: list[Any], problems: Problems) -> None:
    """Several profiles need names that differ; a single one has the default name."""
    first: dict[str, int] = {}
    for index, each in enumerate(given):
        name = each.get("schedulerName", "") if isinstance(each, dict) else None
        if not isinstance(name, str):
            continue
        at = ("profiles", index, "schedulerName")
        if not name and len(given) > 1:
            problems.add(at, name, "is needed where there are several profiles")
        elif name in first:
            problems.add(at, name, f"profiles[{first[name]}] has the same name")
        first.setdefault(name, index)


def _plugin_arguments(
    given: list[Any], problems: Problems, notices: list[str]
) -> dict[str, Section]:
    """Return plugin name -> complete arguments of the elements of one pluginConfig."""
    found: dict[str, Section] = {}
    seen: set[str] = set()
    for index, tree in enumerate(given):
        if problems.full:
            break
        at = problems.below(index)
        config = read(tree, PluginConfig, at)
        if config is None:
            continue
        name = config.name
        if name in seen:
            at.add(("name",), name, "stands twice")
        seen.add(name)
        if name not in PLUGINS:
            removed = name in REMOVED
            hint = "remove its arguments" if removed else meant(name)
            at.add(("name",), name, "was removed" if removed else "unknown plugin", hint)
        elif name not in ARGUMENTS:
            if config.args:
                at.add(("args",), config.args, f"{name} takes no arguments")
        else:
            complete = _arguments_of(name, config.args, at.below("args"), notices)
            if complete is not None:
                found[name] = complete
    return found


def _arguments_of(
    name: str, args: dict[str, Any], problems: Problems, notices: list[str]
) -> Section | None:
    rule = ARGUMENTS[name]
    tree = dict(args)
    for member, wanted in (("apiVersion", GROUP_VERSION), ("kind", f"{name}Args")):
        value = tree.pop(member, wanted)
        if value != wanted:
            problems.add((member,), value, f"expected {wanted}")
    for member, why in rule.idle.items():
        if member in tree:
            notices.append(f"{problems.at}.{member} has no effect: {why}")
    before = len(problems.errors)
    value = read(tree, rule.type, problems)
    if value is None:
        return None
    complete: Section = rule.complete(value, problems)
    return None if len(problems.errors) > before else complete
