//! What makes a thread go on as if nothing had happened, with nobody there to put it right: a frame
//! of a signal on its own stack, and the kernel's own way back from it.
//!
//! ```text
//!   addresses rise                          the thread, when its registers are those of a call
//!   rsp of the thread ──────▶ its stack       syscall                 the call that is wanted
//!   128 bytes below           red zone        ret ──┐                 takes the first word
//!   floating point state      fpstate               ▼
//!   all registers, its mask   ucontext        mov rax, 15; syscall    rt_sigreturn(2): all registers, the floating
//!   address of sigreturn      ◀── rsp                                 point state and the mask as they were
//! ```
//!
//! The frame is below everything that the thread's code may use, so writing it changes nothing. One
//! `PTRACE_SETREGS` then points the thread to the call, all at once. So whenever the tracer is
//! killed, the thread is either where it was, or it runs the call and comes back by itself. Signals
//! that are handled in between have their frames below this one.
//!
//! Sources: arch/x86/kernel/signal_64.c (`rt_sigreturn`), arch/x86/kernel/fpu/signal.c
//! (`__fpu_restore_sig`), arch/x86/include/uapi/asm/sigcontext.h and ucontext.h.

use std::io;

/// Below the stack pointer a leaf function keeps what it likes (System V ABI for x86-64, 3.2.2).
const RED_ZONE: u64 = 128;
/// `struct rt_sigframe`: the return address, `struct ucontext`, and a `siginfo_t` that rt_sigreturn
/// does not read.
const FRAME: u64 = 8 + 304 + 128;
const UC_FP_XSTATE: u64 = 1;
const UC_SIGCONTEXT_SS: u64 = 2;
const UC_STRICT_RESTORE_SS: u64 = 4;
/// No mode of an alternate signal stack: do_sigaltstack refuses it, and restore_altstack ignores
/// the refusal (kernel/signal.c), so the thread keeps the one that it has, which nobody can ask for
/// from outside.
const LEAVE_ALTSTACK: u32 = 0x1234_5678;
/// Where the legacy area has its software bytes (`struct _fpx_sw_bytes`), and the header follows
/// it.
const SOFTWARE_BYTES: usize = 464;
const HEADER: usize = 512;
const LEAST_STATE: usize = HEADER + 64;
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;
/// x87 and SSE.
const LEGACY: u64 = 3;
/// ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND and ERESTART_RESTARTBLOCK (linux/errno.h): a call
/// that was interrupted and is to be made again.
const RESTART: [i64; 4] = [-512, -513, -514, -516];
/// The length of the `syscall` instruction.
const SYSCALL: u64 = 2;

/// Bytes to write to a thread's stack, and where.
#[derive(Debug)]
pub(super) struct Frame {
    /// Its lowest address: the stack pointer for the call.
    pub(super) address: u64,
    pub(super) bytes: Vec<u8>,
}

/// Whether a thread with these registers is within a system call, which is to be restarted or has
/// just ended.
pub(super) fn is_in_call(registers: &libc::user_regs_struct) -> bool {
    registers.orig_rax.cast_signed() >= 0
}

/// The registers with which a thread in user mode goes on where it was interrupted. A call that was
/// to be restarted is made anew, with what it left in its arguments; one with a timeout that only
/// the kernel remembers waits for all of it again.
pub(super) fn resumed(registers: &libc::user_regs_struct) -> libc::user_regs_struct {
    let mut resumed = *registers;
    if is_in_call(registers) && RESTART.contains(&registers.rax.cast_signed()) {
        resumed.rip -= SYSCALL;
        resumed.rax = registers.orig_rax;
    }
    resumed.orig_rax = u64::MAX;
    resumed
}

impl Frame {
    /// The way back to `registers` and `mask` for a thread whose floating point state is `state`,
    /// as ptrace(2) has it (NT_X86_XSTATE), by the code at `sigreturn`.
    pub(super) fn new(
        registers: &libc::user_regs_struct,
        mask: u64,
        state: &[u8],
        sigreturn: u64,
    ) -> io::Result<Self> {
        let state = floating_point(state)?;
        let below = registers.rsp.wrapping_sub(RED_ZONE + state.len() as u64);
        // XRSTOR wants it so.
        let state_at = below & !63;
        let address = state_at.wrapping_sub(FRAME) & !15;
        if address > registers.rsp {
            return Err(io::Error::other("the stack pointer is not one"));
        }
        let to = resumed(registers);
        let mut bytes = Vec::with_capacity((registers.rsp - address) as usize);
        let mut push = |word: u64| bytes.extend(word.to_le_bytes());
        push(sigreturn);
        push(UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS);
        // uc_link, and uc_stack: pointer, flags, size.
        [0, 0, LEAVE_ALTSTACK.into(), 0].into_iter().for_each(&mut push);
        [to.r8, to.r9, to.r10, to.r11, to.r12, to.r13, to.r14, to.r15]
            .into_iter()
            .for_each(&mut push);
        [to.rdi, to.rsi, to.rbp, to.rbx, to.rdx, to.rax, to.rcx, to.rsp]
            .into_iter()
            .for_each(&mut push);
        [to.rip, to.eflags].into_iter().for_each(&mut push);
        // cs, gs, fs and ss, of 16 bits each; the kernel leaves gs and fs of 64-bit code alone.
        push(to.cs & 0xffff | (to.ss & 0xffff) << 48);
        // err, trapno, oldmask, cr2.
        [0, 0, 0, 0].into_iter().for_each(&mut push);
        push(state_at);
        [0; 8].into_iter().for_each(&mut push);
        push(mask);
        bytes.resize((state_at - address) as usize, 0);
        bytes.extend(&state);
        Ok(Self { address, bytes })
    }
}

/// Floating point state as a frame has it, made from that of ptrace(2): the same areas, cut behind
/// the last one in use, with marks that tell where it ends. What is not in use is cut off since its
/// place may be beyond what the thread may use (AMX); the kernel sets it to what it is anyway.
fn floating_point(state: &[u8]) -> io::Result<Vec<u8>> {
    let odd = || io::Error::other("the floating point state is not understood");
    let header =
        state.get(HEADER..HEADER + 8).and_then(|bytes| bytes.try_into().ok()).ok_or_else(odd)?;
    let in_use = u64::from_le_bytes(header);
    let extended = (2..63).filter(|feature| in_use & 1 << feature != 0);
    let end = extended.map(area_end).max().unwrap_or(0).max(LEAST_STATE);
    let mut state = state.get(..end).ok_or_else(odd)?.to_vec();
    let software = &mut state[SOFTWARE_BYTES..HEADER];
    software.fill(0);
    software[..4].copy_from_slice(&MAGIC1.to_le_bytes());
    software[4..8].copy_from_slice(&(end as u32 + 4).to_le_bytes());
    software[8..16].copy_from_slice(&(in_use | LEGACY).to_le_bytes());
    software[16..20].copy_from_slice(&(end as u32).to_le_bytes());
    state.extend(MAGIC2.to_le_bytes());
    Ok(state)
}

/// Where the area of an extended feature ends (SDM volume 1, 13.4.3: the standard format).
fn area_end(feature: u32) -> usize {
    // Newer compilers know that it is safe.
    #[allow(unsafe_code, unused_unsafe)]
    // SAFETY: every x86-64 processor has the instruction, and one with extended state has this
    // leaf.
    let leaf = unsafe { std::arch::x86_64::__cpuid_count(0xd, feature) };
    (leaf.eax + leaf.ebx) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers() -> libc::user_regs_struct {
        // SAFETY: plain integers, for which zero is a value.
        #[allow(unsafe_code)]
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        (registers.rsp, registers.rip, registers.rax, registers.orig_rax) =
            (0x7fff_0000_1238, 0x40_1002, u64::MAX, u64::MAX);
        registers
    }

    #[test]
    fn a_frame_is_below_the_red_zone_and_aligned() {
        let registers = registers();
        let frame = Frame::new(&registers, 7, &[0; LEAST_STATE], 0x1234).unwrap();
        let word = |at: usize| u64::from_le_bytes(frame.bytes[at..at + 8].try_into().unwrap());
        assert_eq!(frame.address % 16, 0);
        assert!(frame.address + frame.bytes.len() as u64 <= registers.rsp - RED_ZONE);
        let state_at = word(8 + 40 + 23 * 8);
        assert_eq!((word(0), word(8 + 40 + 16 * 8), word(304)), (0x1234, registers.rip, 7));
        assert_eq!(state_at % 64, 0);
        assert_eq!(state_at - frame.address + LEAST_STATE as u64 + 4, frame.bytes.len() as u64);
    }

    #[test]
    fn a_call_that_was_interrupted_is_made_anew() {
        let mut registers = registers();
        registers.orig_rax = 271;
        registers.rax = (-514i64).cast_unsigned();
        let resumed = resumed(&registers);
        assert_eq!((resumed.rip, resumed.rax, resumed.orig_rax), (0x40_1000, 271, u64::MAX));
        // One that had ended is not.
        registers.rax = 3;
        let resumed = super::resumed(&registers);
        assert_eq!((resumed.rip, resumed.rax, resumed.orig_rax), (0x40_1002, 3, u64::MAX));
    }

    #[test]
    fn a_state_that_is_too_short_is_refused() {
        assert!(Frame::new(&registers(), 0, &[0; 500], 0).is_err());
    }
}
