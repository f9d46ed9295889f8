//! All that KVM keeps for one vCPU: saved to the blob and loaded from it.
//!
//! Keeps one promise: a state that was loaded without an error is the state that was saved. What
//! this host's KVM cannot take over (a CPU feature, a model-specific register) is an error that
//! names it. The order matters and is that of Documentation/virt/kvm/api.rst and of QEMU's
//! `kvm_arch_put_registers`: CPUID before everything that it allows, special registers (with the
//! APIC's base) before the APIC, the time-stamp counter before the timer that waits for it, events
//! last.
#![allow(unsafe_code)]

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use zerocopy::{FromBytes, IntoBytes};

use crate::blob::{Blob, Tag, Writer};
use crate::error::kvm;
use crate::{MicrovmError, StateError};

const TSC_DEADLINE: u32 = 0x6e0;
/// Beyond this the guest would notice that its clock runs differently; QEMU's limit as well
/// (`kvm_arch_set_tsc_khz`).
const TSC_PPM: u64 = 250;
/// One of a leaf's four registers.
type Register = fn(&kvm_cpuid_entry2) -> u32;

/// CPUID leaves and registers in which a set bit is a feature: a destination must have them all.
const FEATURES: [(u32, u32, Register); 7] = [
    (1, 0, |entry| entry.ecx),
    (1, 0, |entry| entry.edx),
    (7, 0, |entry| entry.ebx),
    (7, 0, |entry| entry.ecx),
    (7, 0, |entry| entry.edx),
    (0x8000_0001, 0, |entry| entry.ecx),
    (0x8000_0001, 0, |entry| entry.edx),
];

/// The CPUID of vCPU `number`: all that this KVM has, and the parts of the local APIC that it does
/// in software.
pub(crate) fn cpuid(system: &Kvm, number: u32) -> Result<CpuId, MicrovmError> {
    let mut cpuid = system
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm("KVM_GET_SUPPORTED_CPUID"))?;
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                // x2APIC, the timer's deadline mode, and "there is a hypervisor".
                entry.ecx |= 1 << 21 | 1 << 24 | 1 << 31;
                entry.ebx = entry.ebx & 0x00ff_ffff | number << 24;
            }
            0xb | 0x1f => entry.edx = number,
            _ => {}
        }
    }
    Ok(cpuid)
}

/// The model-specific registers of this KVM that can be read.
pub(crate) fn readable_msrs(system: &Kvm, vcpu: &VcpuFd) -> Result<Vec<u32>, MicrovmError> {
    let list = system.get_msr_index_list().map_err(kvm("KVM_GET_MSR_INDEX_LIST"))?;
    let mut left = list.as_slice();
    let mut readable = Vec::new();
    while !left.is_empty() {
        let got = get_msrs(vcpu, left)?.len();
        readable.extend(&left[..got]);
        // KVM stops at the first that it cannot read.
        left = &left[(got + 1).min(left.len())..];
    }
    Ok(readable)
}

fn get_msrs(vcpu: &VcpuFd, numbers: &[u32]) -> Result<Vec<kvm_msr_entry>, MicrovmError> {
    let entries: Vec<_> =
        numbers.iter().map(|&index| kvm_msr_entry { index, ..Default::default() }).collect();
    let mut msrs = msr_list(&entries)?;
    let got = vcpu.get_msrs(&mut msrs).map_err(kvm("KVM_GET_MSRS"))?;
    Ok(msrs.as_slice()[..got.min(numbers.len())].to_vec())
}

fn msr_list(entries: &[kvm_msr_entry]) -> Result<Msrs, MicrovmError> {
    Msrs::from_entries(entries)
        .map_err(|_| StateError::Malformed("too many registers".to_owned()).into())
}

/// Saves vCPU `number`, which is stopped.
pub(crate) fn save(
    vcpu: &VcpuFd,
    number: u32,
    msrs: &[u32],
    into: &mut Writer,
) -> Result<(), MicrovmError> {
    // First: it lets KVM settle what is pending (api.rst, KVM_GET_MP_STATE).
    let mp_state = vcpu.get_mp_state().map_err(kvm("KVM_GET_MP_STATE"))?;
    let cpuid = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(kvm("KVM_GET_CPUID2"))?;
    let tsc_khz = vcpu.get_tsc_khz().map_err(kvm("KVM_GET_TSC_KHZ"))?;
    let mut put = |tag, bytes: &[u8]| into.section(tag, number, bytes);
    put(Tag::MpState, mp_state.as_bytes());
    put(Tag::CpuId, cpuid.as_slice().as_bytes());
    put(Tag::TscKhz, &tsc_khz.to_le_bytes());
    put(Tag::Regs, vcpu.get_regs().map_err(kvm("KVM_GET_REGS"))?.as_bytes());
    put(Tag::Sregs, vcpu.get_sregs().map_err(kvm("KVM_GET_SREGS"))?.as_bytes());
    put(Tag::Xsave, vcpu.get_xsave().map_err(kvm("KVM_GET_XSAVE"))?.as_bytes());
    put(Tag::Xcrs, vcpu.get_xcrs().map_err(kvm("KVM_GET_XCRS"))?.as_bytes());
    put(Tag::DebugRegs, vcpu.get_debug_regs().map_err(kvm("KVM_GET_DEBUGREGS"))?.as_bytes());
    put(Tag::Lapic, vcpu.get_lapic().map_err(kvm("KVM_GET_LAPIC"))?.as_bytes());
    put(Tag::Msrs, get_msrs(vcpu, msrs)?.as_bytes());
    put(Tag::Events, vcpu.get_vcpu_events().map_err(kvm("KVM_GET_VCPU_EVENTS"))?.as_bytes());
    Ok(())
}

/// One structure of the kernel's from its section.
fn structure<T: FromBytes>(blob: &Blob<'_>, tag: Tag, number: u32) -> Result<T, StateError> {
    let bytes = blob.section(tag, number)?;
    T::read_from_bytes(bytes)
        .map_err(|_| StateError::Malformed(format!("section {tag:?} has {} bytes", bytes.len())))
}

/// Several of them.
fn structures<T: FromBytes>(blob: &Blob<'_>, tag: Tag, number: u32) -> Result<Vec<T>, StateError> {
    let bytes = blob.section(tag, number)?;
    let parts = bytes.chunks(size_of::<T>()).map(T::read_from_bytes);
    parts
        .collect::<Result<_, _>>()
        .map_err(|_| StateError::Malformed(format!("section {tag:?} has {} bytes", bytes.len())))
}

/// Loads vCPU `number`, which has never run.
pub(crate) fn load(vcpu: &VcpuFd, number: u32, blob: &Blob<'_>) -> Result<(), MicrovmError> {
    load_cpuid(vcpu, number, blob)?;
    load_tsc_rate(vcpu, number, blob)?;
    let sregs: kvm_sregs = structure(blob, Tag::Sregs, number)?;
    vcpu.set_sregs(&sregs).map_err(kvm("KVM_SET_SREGS"))?;
    let regs: kvm_regs = structure(blob, Tag::Regs, number)?;
    vcpu.set_regs(&regs).map_err(kvm("KVM_SET_REGS"))?;
    let xcrs: kvm_xcrs = structure(blob, Tag::Xcrs, number)?;
    vcpu.set_xcrs(&xcrs).map_err(kvm("KVM_SET_XCRS"))?;
    let xsave: kvm_xsave = structure(blob, Tag::Xsave, number)?;
    // SAFETY: KVM reads as many bytes as KVM_CAP_XSAVE2 says, which is the 4096 of this structure
    // unless the process has asked for more features with arch_prctl(2), which it does not.
    unsafe { vcpu.set_xsave(&xsave) }.map_err(kvm("KVM_SET_XSAVE"))?;
    let debug: kvm_debugregs = structure(blob, Tag::DebugRegs, number)?;
    vcpu.set_debug_regs(&debug).map_err(kvm("KVM_SET_DEBUGREGS"))?;
    let msrs: Vec<kvm_msr_entry> = structures(blob, Tag::Msrs, number)?;
    let (deadline, others): (Vec<_>, Vec<_>) =
        msrs.into_iter().partition(|msr| msr.index == TSC_DEADLINE);
    set_msrs(vcpu, &others)?;
    let lapic: kvm_lapic_state = structure(blob, Tag::Lapic, number)?;
    vcpu.set_lapic(&lapic).map_err(kvm("KVM_SET_LAPIC"))?;
    set_msrs(vcpu, &deadline)?;
    let mp_state: kvm_mp_state = structure(blob, Tag::MpState, number)?;
    vcpu.set_mp_state(mp_state).map_err(kvm("KVM_SET_MP_STATE"))?;
    let events: kvm_vcpu_events = structure(blob, Tag::Events, number)?;
    vcpu.set_vcpu_events(&events).map_err(kvm("KVM_SET_VCPU_EVENTS"))?;
    Ok(())
}

fn load_cpuid(vcpu: &VcpuFd, number: u32, blob: &Blob<'_>) -> Result<(), MicrovmError> {
    let entries: Vec<kvm_cpuid_entry2> = structures(blob, Tag::CpuId, number)?;
    let own = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(kvm("KVM_GET_CPUID2"))?;
    let find = |list: &[kvm_cpuid_entry2], leaf, subleaf, register: Register| {
        list.iter().find(|e| (e.function, e.index) == (leaf, subleaf)).map_or(0, register)
    };
    for (leaf, subleaf, register) in FEATURES {
        // OSXSAVE follows CR4 and is no feature of the processor.
        let ignored = if leaf == 1 { 1 << 27 } else { 0 };
        let theirs = find(&entries, leaf, subleaf, register);
        let missing = theirs & !find(own.as_slice(), leaf, subleaf, register) & !ignored;
        if missing != 0 {
            return Err(StateError::Misfit(format!(
                "this host's processor lacks features that the guest has seen (CPUID leaf \
                 {leaf:#x}, bits {missing:#x}): migrate to a host of the same kind or newer"
            ))
            .into());
        }
    }
    let cpuid = CpuId::from_entries(&entries)
        .map_err(|_| StateError::Malformed("too many CPUID leaves".to_owned()))?;
    vcpu.set_cpuid2(&cpuid).map_err(kvm("KVM_SET_CPUID2"))
}

fn load_tsc_rate(vcpu: &VcpuFd, number: u32, blob: &Blob<'_>) -> Result<(), MicrovmError> {
    let theirs: u32 = structure(blob, Tag::TscKhz, number)?;
    let own = vcpu.get_tsc_khz().map_err(kvm("KVM_GET_TSC_KHZ"))?;
    let apart = u64::from(theirs.abs_diff(own)) * 1_000_000 / u64::from(own.max(1));
    if theirs == own || vcpu.set_tsc_khz(theirs).is_ok() || apart <= TSC_PPM {
        return Ok(());
    }
    Err(StateError::Misfit(format!(
        "the guest's time-stamp counter runs at {theirs} kHz, this host's at {own} kHz and it \
         cannot scale it"
    ))
    .into())
}

/// Sets registers. One that KVM refuses to set is fine if it has the value already.
fn set_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), MicrovmError> {
    let mut left = entries;
    while !left.is_empty() {
        let set = vcpu.set_msrs(&msr_list(left)?).map_err(kvm("KVM_SET_MSRS"))?;
        let Some(refused) = left.get(set) else { return Ok(()) };
        let own = get_msrs(vcpu, &[refused.index])?;
        if own.first().is_none_or(|own| own.data != refused.data) {
            let own = own.first().map_or("nothing".to_owned(), |own| format!("{:#x}", own.data));
            return Err(StateError::Misfit(format!(
                "this KVM does not set model-specific register {:#x} to {:#x} (it holds {own})",
                refused.index, refused.data
            ))
            .into());
        }
        left = &left[set + 1..];
    }
    Ok(())
}
