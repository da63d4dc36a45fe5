"""Every label, annotation, resource and data key of the cluster API, once.

A key names who puts it where in its section heading; values and their grammar live with their types
(`apis.annotations`, `apis.topology`, ...). Upstream has them in its Go package
`apis/extension`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# --- pod: QoS, priority, what the node does with it -------------------------------------------

LABEL_QOS_CLASS: Final = "koordinator.sh/qosClass"
LABEL_PRIORITY: Final = "koordinator.sh/priority"
LABEL_PRIORITY_CLASS: Final = "koordinator.sh/priority-class"
LABEL_CORE_SCHED_GROUP_ID: Final = "koordinator.sh/core-sched-group-id"
LABEL_CORE_SCHED_POLICY: Final = "koordinator.sh/core-sched-policy"
LABEL_EVICTION_ENABLED: Final = "koordinator.sh/eviction-enabled"
LABEL_GPU_ISOLATION_PROVIDER: Final = "koordinator.sh/gpu-isolation-provider"
LABEL_EVICT_POLICY: Final = "koordinator.sh/evict-policy"
LABEL_BINDING_ADMISSION_BYPASS: Final = "koordinator.sh/binding-admission-bypass"
LABEL_MUTATING_UPDATE: Final = "pod.koordinator.sh/mutating-update"
LABEL_SKIP_ENHANCED_VALIDATION: Final = "pod.koordinator.sh/skip-enhanced-validation"
LABEL_SKIP_HOOKSERVER: Final = "runtimeproxy.koordinator.sh/skip-hookserver"
LABEL_HAMI_VGPU_NODE: Final = "hami.io/vgpu-node"

ANNOTATION_CPU_BURST: Final = "koordinator.sh/cpuBurst"
ANNOTATION_CPU_QOS: Final = "koordinator.sh/cpuQOS"
ANNOTATION_MEMORY_QOS: Final = "koordinator.sh/memoryQOS"
ANNOTATION_MEMORY_QOS_OLD: Final = "koordinator.sh/memoryQoS"
ANNOTATION_BLKIO_QOS: Final = "koordinator.sh/blkioQOS"
ANNOTATION_NETWORK_QOS: Final = "koordinator.sh/networkQOS"
ANNOTATION_RESCTRL: Final = "node.koordinator.sh/resctrl"
ANNOTATION_EXTENDED_RESOURCE_SPEC: Final = "node.koordinator.sh/extended-resource-spec"
ANNOTATION_EVICTION_POLICY: Final = "koordinator.sh/eviction-policy"
ANNOTATION_EVICTION_PRIORITY: Final = "koordinator.sh/eviction-priority"
ANNOTATION_OOM_SCORE_ADJ: Final = "koordinator.sh/oom-score-adj"
ANNOTATION_OOM_SCORE_ADJ_SPEC: Final = "koordinator.sh/oom-score-adj-spec"
ANNOTATION_REPLACE_RESOURCES: Final = "pod.koordinator.sh/replace-resources"

# --- pod: gang, topology, scheduling ----------------------------------------------------------

ANNOTATION_GANG_NAME: Final = "gang.scheduling.koordinator.sh/name"
ANNOTATION_GANG_MIN_AVAILABLE: Final = "gang.scheduling.koordinator.sh/min-available"
ANNOTATION_GANG_TOTAL_NUMBER: Final = "gang.scheduling.koordinator.sh/total-number"
ANNOTATION_GANG_MODE: Final = "gang.scheduling.koordinator.sh/mode"
ANNOTATION_GANG_WAITING_TIME: Final = "gang.scheduling.koordinator.sh/waiting-time"
ANNOTATION_GANG_GROUPS: Final = "gang.scheduling.koordinator.sh/groups"
ANNOTATION_GANG_MATCH_POLICY: Final = "gang.scheduling.koordinator.sh/match-policy"
ANNOTATION_GANG_TIMEOUT: Final = "gang.scheduling.koordinator.sh/timeout"
ANNOTATION_GANG_NETWORK_TOPOLOGY_INDEX: Final = (
    "gang.scheduling.koordinator.sh/network-topology-index"
)
ANNOTATION_GANG_NETWORK_TOPOLOGY_SPEC: Final = (
    "gang.scheduling.koordinator.sh/network-topology-spec"
)
LABEL_POD_GROUP: Final = "pod-group.scheduling.sigs.k8s.io"
LABEL_LIGHTWEIGHT_GANG_NAME: Final = "pod-group.scheduling.sigs.k8s.io/name"
LABEL_LIGHTWEIGHT_GANG_MIN_AVAILABLE: Final = "pod-group.scheduling.sigs.k8s.io/min-available"
ANNOTATION_POD_GROUP_MATCH_POLICY: Final = "pod-group.scheduling.sigs.k8s.io/match-policy"
ANNOTATION_BIND_GANG_GROUP_ID: Final = "internal.scheduling.koordinator.sh/bind-gang-group-id"
ANNOTATION_BIND_GANG_MEMBER_COUNT: Final = (
    "internal.scheduling.koordinator.sh/bind-gang-member-count"
)
ANNOTATION_BIND_GANG_GROUP_ID_OLD: Final = "scheduling.koordinator.sh/bind-gang-group-id"
ANNOTATION_BIND_GANG_MEMBER_COUNT_OLD: Final = "scheduling.koordinator.sh/bind-gang-member-count"
ANNOTATION_NETWORK_TOPOLOGY_SELECTOR: Final = "scheduling.koordinator.sh/network-topology-selector"
LABEL_SCHEDULER_NAME: Final = "scheduling.koordinator.sh/scheduler-name"
ANNOTATION_ORIGINAL_SCHEDULER_NAME: Final = (
    "internal.scheduling.koordinator.sh/original-scheduler-name"
)
ANNOTATION_SCHEDULING_HINT: Final = "internal.scheduling.koordinator.sh/scheduling-hint"
ANNOTATION_SCHEDULING_HINT_OLD: Final = "scheduling.koordinator.sh/scheduling-hint"
LABEL_QUESTIONED_OBJECT_KEY: Final = "scheduling.koordinator.sh/questioned-object-key"
LABEL_TOPOLOGY_KEY_TO_EXPLAIN: Final = "scheduling.koordinator.sh/topology-key-to-explain"
LABEL_PREEMPTION_POLICY: Final = "scheduling.koordinator.sh/preemption-policy"
LABEL_DISABLE_PREEMPTIBLE: Final = "scheduling.koordinator.sh/disable-preemptible"
ANNOTATION_RESOURCE_SPEC: Final = "scheduling.koordinator.sh/resource-spec"
ANNOTATION_RESOURCE_STATUS: Final = "scheduling.koordinator.sh/resource-status"
ANNOTATION_NUMA_TOPOLOGY_SPEC: Final = "scheduling.koordinator.sh/numa-topology-spec"
ANNOTATION_LOAD_ESTIMATED_SCALING_FACTORS: Final = (
    "scheduling.koordinator.sh/load-estimated-scaling-factors"
)
ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_POD_SCHEDULED: Final = (
    "scheduling.koordinator.sh/load-estimated-seconds-after-pod-scheduled"
)
ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_INITIALIZED: Final = (
    "scheduling.koordinator.sh/load-estimated-seconds-after-initialized"
)
LABEL_QUOTA_NAME: Final = "quota.scheduling.koordinator.sh/name"
LABEL_PREEMPTIBLE: Final = "quota.scheduling.koordinator.sh/preemptible"

# --- pod: devices, reservations, descheduling --------------------------------------------------

ANNOTATION_DEVICE_ALLOCATED: Final = "scheduling.koordinator.sh/device-allocated"
ANNOTATION_DEVICE_ALLOCATE_HINT: Final = "scheduling.koordinator.sh/device-allocate-hint"
ANNOTATION_DEVICE_JOINT_ALLOCATE: Final = "scheduling.koordinator.sh/device-joint-allocate"
ANNOTATION_GPU_PARTITION_SPEC: Final = "scheduling.koordinator.sh/gpu-partition-spec"
ANNOTATION_BIND_TIMESTAMP: Final = "scheduling.koordinator.sh/bind-timestamp"
ANNOTATION_GPU_MINORS: Final = "scheduling.koordinator.sh/gpu-minors"
ANNOTATION_PREDICATE_TIME: Final = "predicate-time"
ANNOTATION_HUAWEI_NPU_CORE: Final = "huawei.com/npu-core"
ANNOTATION_HUAWEI_ASCEND_310P: Final = "huawei.com/Ascend310P"
ANNOTATION_CAMBRICON_ASSIGNED: Final = "CAMBRICON_DSMLU_ASSIGHED"
ANNOTATION_CAMBRICON_PROFILE: Final = "CAMBRICON_DSMLU_PROFILE"
ANNOTATION_METAX_GPU_ALLOCATED: Final = "metax-tech.com/gpu-devices-allocated"
ANNOTATION_RESERVATION_ALLOCATED: Final = "scheduling.koordinator.sh/reservation-allocated"
ANNOTATION_RESERVATION_AFFINITY: Final = "scheduling.koordinator.sh/reservation-affinity"
LABEL_RESERVATION_IGNORED: Final = "scheduling.koordinator.sh/reservation-ignored"
ANNOTATION_EXACT_MATCH_RESERVATION: Final = "scheduling.koordinator.sh/exact-match-reservation"
LABEL_OPERATING_MODE: Final = "scheduling.koordinator.sh/operating-mode"
ANNOTATION_RESERVATION_OWNERS: Final = "scheduling.koordinator.sh/reservation-owners"
ANNOTATION_RESERVATION_CURRENT_OWNER: Final = "scheduling.koordinator.sh/reservation-current-owner"
ANNOTATION_RESERVE_POD: Final = "scheduling.koordinator.sh/reserve-pod"
ANNOTATION_RESERVATION_NAME: Final = "scheduling.koordinator.sh/reservation-name"
ANNOTATION_RESERVATION_NODE: Final = "scheduling.koordinator.sh/reservation-node"
ANNOTATION_IS_PRE_ALLOCATION: Final = "scheduling.koordinator.sh/is-pre-allocation"
LABEL_IS_PRE_ALLOCATABLE: Final = "pod.koordinator.sh/is-pre-allocatable"
ANNOTATION_PRE_ALLOCATABLE_PRIORITY: Final = "pod.koordinator.sh/pre-allocatable-priority"
ANNOTATION_EVICTION_COST: Final = "scheduling.koordinator.sh/eviction-cost"
ANNOTATION_SOFT_EVICTION: Final = "scheduling.koordinator.sh/soft-eviction"
ANNOTATION_EVICT_REASON: Final = "koordinator.sh/evict-reason"
ANNOTATION_EVICT_TRIGGER: Final = "koordinator.sh/evict-trigger"
ANNOTATION_JOB_CREATED_BY: Final = "koordinator.sh/job-created-by"
ANNOTATION_PASSED_ARBITRATION: Final = "descheduler.koordinator.sh/passed-arbitration"
ANNOTATION_POD_ARBITRATING: Final = "descheduler.koordinator.sh/pod-arbitrating"
ANNOTATION_EVICT: Final = "descheduler.alpha.kubernetes.io/evict"

# --- Node, NodeResourceTopology, Device --------------------------------------------------------

ANNOTATION_NODE_RESERVATION: Final = "node.koordinator.sh/reservation"
ANNOTATION_COLOCATION_STRATEGY: Final = "node.koordinator.sh/colocation-strategy"
LABEL_CPU_RECLAIM_RATIO: Final = "node.koordinator.sh/cpu-reclaim-ratio"
LABEL_MEMORY_RECLAIM_RATIO: Final = "node.koordinator.sh/memory-reclaim-ratio"
LABEL_MID_STATIC_CPU_RESERVED_RATIO: Final = "node.koordinator.sh/mid-static-cpu-reserved-ratio"
LABEL_MID_STATIC_MEMORY_RESERVED_RATIO: Final = (
    "node.koordinator.sh/mid-static-memory-reserved-ratio"
)
LABEL_CPU_NORMALIZATION_ENABLED: Final = "node.koordinator.sh/cpu-normalization-enabled"
ANNOTATION_CPU_NORMALIZATION_RATIO: Final = "node.koordinator.sh/cpu-normalization-ratio"
ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: Final = "node.koordinator.sh/resource-amplification-ratio"
ANNOTATION_RAW_ALLOCATABLE: Final = "node.koordinator.sh/raw-allocatable"
ANNOTATION_ORIGIN_EXTENDED_ALLOCATABLE: Final = "node.koordinator.sh/originExtendedAllocatable"
ANNOTATION_THIRD_PARTY_ALLOCATIONS: Final = "node.koordinator.sh/thirdPartyAllocations"
ANNOTATION_NETWORK_BANDWIDTH: Final = "node.koordinator.sh/network-bandwidth"
ANNOTATION_SYSTEM_QOS_RESOURCE: Final = "node.koordinator.sh/system-qos-resource"
ANNOTATION_USAGE_THRESHOLDS: Final = "scheduling.koordinator.sh/usage-thresholds"
LABEL_CPU_BIND_POLICY: Final = "node.koordinator.sh/cpu-bind-policy"
LABEL_NUMA_ALLOCATE_STRATEGY: Final = "node.koordinator.sh/numa-allocate-strategy"
LABEL_NUMA_TOPOLOGY_POLICY: Final = "node.koordinator.sh/numa-topology-policy"
LABEL_ENABLE_NUMA_RESERVATION: Final = "node.koordinator.sh/enable-numa-reservation"
LABEL_GPU_VENDOR: Final = "node.koordinator.sh/gpu-vendor"
LABEL_GPU_MODEL: Final = "node.koordinator.sh/gpu-model"
LABEL_GPU_DRIVER_VERSION: Final = "node.koordinator.sh/gpu-driver-version"
LABEL_GPU_MODEL_OLD: Final = "kubernetes.io/gpu-model"
LABEL_GPU_DRIVER_OLD: Final = "kubernetes.io/gpu-driver"
LABEL_GPU_PARTITION_POLICY: Final = "node.koordinator.sh/gpu-partition-policy"
LABEL_SECONDARY_DEVICE_WELL_PLANNED: Final = "node.koordinator.sh/secondary-device-well-planned"
ANNOTATION_GPU_PARTITIONS: Final = "scheduling.koordinator.sh/gpu-partitions"
ANNOTATION_HAMI_LOCK: Final = "hami.io/mutex.lock"
ANNOTATION_CAMBRICON_LOCK: Final = "cambricon.com/dsmlu.lock"
ANNOTATION_CPU_TOPOLOGY: Final = "node.koordinator.sh/cpu-topology"
ANNOTATION_CPU_BASIC_INFO: Final = "node.koordinator.sh/cpu-basic-info"
ANNOTATION_POD_CPU_ALLOCS: Final = "node.koordinator.sh/pod-cpu-allocs"
ANNOTATION_CPU_SHARED_POOLS: Final = "node.koordinator.sh/cpu-shared-pools"
ANNOTATION_BE_CPU_SHARED_POOLS: Final = "node.koordinator.sh/be-cpu-shared-pools"
ANNOTATION_CPU_MANAGER_POLICY: Final = "kubelet.koordinator.sh/cpu-manager-policy"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY_KOORDINATOR: Final = "Koordinator"

# --- ElasticQuota, ElasticQuotaProfile ---------------------------------------------------------

LABEL_QUOTA_IS_PARENT: Final = "quota.scheduling.koordinator.sh/is-parent"
LABEL_QUOTA_PARENT: Final = "quota.scheduling.koordinator.sh/parent"
LABEL_QUOTA_ALLOW_LENT_RESOURCE: Final = "quota.scheduling.koordinator.sh/allow-lent-resource"
LABEL_QUOTA_TREE_ID: Final = "quota.scheduling.koordinator.sh/tree-id"
LABEL_QUOTA_IS_ROOT: Final = "quota.scheduling.koordinator.sh/is-root"
LABEL_QUOTA_IGNORE_DEFAULT_TREE: Final = "quota.scheduling.koordinator.sh/ignore-default-tree"
LABEL_QUOTA_PROFILE: Final = "quota.scheduling.koordinator.sh/profile"
LABEL_QUOTA_ALLOW_FORCE_UPDATE: Final = "quota.scheduling.koordinator.sh/allow-force-update"
ANNOTATION_QUOTA_SHARED_WEIGHT: Final = "quota.scheduling.koordinator.sh/shared-weight"
ANNOTATION_QUOTA_NAMESPACES: Final = "quota.scheduling.koordinator.sh/namespaces"
ANNOTATION_QUOTA_RESOURCE_KEYS: Final = "quota.scheduling.koordinator.sh/resource-keys"
ANNOTATION_QUOTA_TOTAL_RESOURCE: Final = "quota.scheduling.koordinator.sh/total-resource"
ANNOTATION_QUOTA_UNSCHEDULABLE_RESOURCE: Final = (
    "quota.scheduling.koordinator.sh/unschedulable-resource"
)
ANNOTATION_QUOTA_RUNTIME: Final = "quota.scheduling.koordinator.sh/runtime"
ANNOTATION_QUOTA_REQUEST: Final = "quota.scheduling.koordinator.sh/request"
ANNOTATION_QUOTA_CHILD_REQUEST: Final = "quota.scheduling.koordinator.sh/child-request"
ANNOTATION_QUOTA_GUARANTEED: Final = "quota.scheduling.koordinator.sh/guaranteed"
ANNOTATION_QUOTA_ALLOCATED: Final = "quota.scheduling.koordinator.sh/allocated"
ANNOTATION_QUOTA_NON_PREEMPTIBLE_REQUEST: Final = (
    "quota.scheduling.koordinator.sh/non-preemptible-request"
)
ANNOTATION_QUOTA_NON_PREEMPTIBLE_USED: Final = (
    "quota.scheduling.koordinator.sh/non-preemptible-used"
)
ANNOTATION_QUOTA_ADMISSION: Final = "quota.scheduling.koordinator.sh/admission"
ANNOTATION_QUOTA_MAX_STRICT_CHECK_RESOURCE_KEYS: Final = (
    "quota.scheduling.koordinator.sh/max-strict-check-resource-keys"
)
ROOT_QUOTA: Final = "koordinator-root-quota"
SYSTEM_QUOTA: Final = "koordinator-system-quota"
DEFAULT_QUOTA: Final = "koordinator-default-quota"

# --- Reservation, profile, namespace, config map -----------------------------------------------

LABEL_RESERVATION_ORDER: Final = "scheduling.koordinator.sh/reservation-order"
LABEL_PRE_ALLOCATION_REQUIRED: Final = "scheduling.koordinator.sh/pre-allocation-required"
ANNOTATION_RESERVATION_RESTRICTED_OPTIONS: Final = (
    "scheduling.koordinator.sh/reservation-restricted-options"
)
ANNOTATION_RESERVATION_RESIZE_ALLOCATABLE: Final = (
    "scheduling.koordinator.sh/reservation-resize-allocatable"
)
LABEL_CREATED_BY: Final = "app.kubernetes.io/created-by"
ANNOTATION_SKIP_UPDATE_RESOURCES: Final = "config.koordinator.sh/skip-update-resources"
LABEL_CONTROLLER_MANAGED: Final = "config.koordinator.sh/controller-managed"
LABEL_CONTROL_PLANE: Final = "control-plane"
LABEL_CONFIGMAP_TYPE: Final = "koordinator.sh/configmap-type"
ANNOTATION_WEBHOOK_TEMPLATE: Final = "template"

SLO_CONFIG_NAME: Final = "slo-controller-config"
KOORDINATOR_NAMESPACE: Final = "koordinator-system"
CONFIG_COLOCATION: Final = "colocation-config"
CONFIG_RESOURCE_THRESHOLD: Final = "resource-threshold-config"
CONFIG_RESOURCE_QOS: Final = "resource-qos-config"
CONFIG_CPU_BURST: Final = "cpu-burst-config"
CONFIG_SYSTEM: Final = "system-config"
CONFIG_HOST_APPLICATION: Final = "host-application-config"
CONFIG_CPU_NORMALIZATION: Final = "cpu-normalization-config"
CONFIG_RESOURCE_AMPLIFICATION: Final = "resource-amplification-config"

# --- resource names ----------------------------------------------------------------------------

CPU: Final = "cpu"
MEMORY: Final = "memory"
PODS: Final = "pods"
EPHEMERAL_STORAGE: Final = "ephemeral-storage"
HUGEPAGES_2MI: Final = "hugepages-2Mi"
HUGEPAGES_1GI: Final = "hugepages-1Gi"
BATCH_CPU: Final = "kubernetes.io/batch-cpu"
"""Integer milli-cores: `.value()` of the quantity is the number of milli-cores."""
BATCH_MEMORY: Final = "kubernetes.io/batch-memory"
MID_CPU: Final = "kubernetes.io/mid-cpu"
"""Integer milli-cores, as BATCH_CPU."""
MID_MEMORY: Final = "kubernetes.io/mid-memory"
GPU: Final = "koordinator.sh/gpu"
GPU_CORE: Final = "koordinator.sh/gpu-core"
GPU_MEMORY: Final = "koordinator.sh/gpu-memory"
GPU_MEMORY_RATIO: Final = "koordinator.sh/gpu-memory-ratio"
GPU_SHARED: Final = "koordinator.sh/gpu.shared"
RDMA: Final = "koordinator.sh/rdma"
FPGA: Final = "koordinator.sh/fpga"
NVIDIA_GPU: Final = "nvidia.com/gpu"
HYGON_DCU: Final = "dcu.com/gpu"
AMD_GPU: Final = "amd.com/gpu"
HUAWEI_NPU_CORE: Final = "huawei.com/npu-core"
HUAWEI_NPU_CPU: Final = "huawei.com/npu-cpu"
HUAWEI_NPU_DVPP: Final = "huawei.com/npu-dvpp"

DEPRECATED_RESOURCES: Final[Mapping[str, str]] = {
    "koordinator.sh/batch-cpu": BATCH_CPU,
    "koordinator.sh/batch-memory": BATCH_MEMORY,
    "kubernetes.io/rdma": RDMA,
    "kubernetes.io/fpga": FPGA,
    "kubernetes.io/gpu": GPU,
    "kubernetes.io/gpu-core": GPU_CORE,
    "kubernetes.io/gpu-memory": GPU_MEMORY,
    "kubernetes.io/gpu-memory-ratio": GPU_MEMORY_RATIO,
}
"""Old resource name -> the name that replaced it ."""
