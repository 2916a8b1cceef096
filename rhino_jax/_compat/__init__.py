"""The only package that uses JAX's private modules or spans its versions.

Supported: jax 0.10.2 (Python 3.11) to 0.12 (Python 3.12). Each function says what
differs between them.
"""

from __future__ import annotations

from rhino_jax._compat.attention import (
    fused_attention_traced as fused_attention_traced,
)
from rhino_jax._compat.compiling import (
    JITTED as JITTED,
    CompiledInput as CompiledInput,
    compiler_input as compiler_input,
    context_mesh as context_mesh,
    is_outermost as is_outermost,
    jit_options as jit_options,
    jit_shardings as jit_shardings,
)
from rhino_jax._compat.devices import (
    at_cpu_client as at_cpu_client,
    compiling_anew as compiling_anew,
    coordination_client as coordination_client,
    end_without_others as end_without_others,
    is_array_deleted as is_array_deleted,
    is_compile_only as is_compile_only,
    make_cpu_devices as make_cpu_devices,
    num_emulated_devices as num_emulated_devices,
    num_tpu_chips as num_tpu_chips,
    only_nccl as only_nccl,
    own_host as own_host,
    parameter_axes as parameter_axes,
    sharding_of_array as sharding_of_array,
)
from rhino_jax._compat.jaxprs import (
    captured_as_inputs as captured_as_inputs,
    close_jaxpr as close_jaxpr,
    consts_as_inputs as consts_as_inputs,
    discharged as discharged,
    is_drop_var as is_drop_var,
    is_jaxpr as is_jaxpr,
    is_literal as is_literal,
    jaxpr_consts as jaxpr_consts,
    last_as_consts as last_as_consts,
    like_jaxpr as like_jaxpr,
    low_jaxpr as low_jaxpr,
    open_jaxpr as open_jaxpr,
    pickled as pickled,
    ref_value as ref_value,
    references_as_arguments as references_as_arguments,
    scan_counts as scan_counts,
    set_ref_value as set_ref_value,
    with_eqns as with_eqns,
    with_type as with_type,
    without_dead_code as without_dead_code,
    without_refs as without_refs,
)
from rhino_jax._compat.tracing import (
    TypedInputs as TypedInputs,
    at_line_of as at_line_of,
    bind_eqn as bind_eqn,
    context_without_mesh as context_without_mesh,
    current_source as current_source,
    eqn_context as eqn_context,
    hide_frames as hide_frames,
    in_current_mesh as in_current_mesh,
    instead_of_vjp as instead_of_vjp,
    is_on_host as is_on_host,
    key_words as key_words,
    name_as as name_as,
    new_primitive as new_primitive,
    retrace as retrace,
    tagged as tagged,
    threefry_words as threefry_words,
    type_on as type_on,
    untagged as untagged,
    user_frames as user_frames,
    user_spans as user_spans,
    with_weak_types as with_weak_types,
    without_mesh as without_mesh,
)
