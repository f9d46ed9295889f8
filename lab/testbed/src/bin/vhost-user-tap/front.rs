//! What QEMU says over the socket (QEMU, docs/interop/vhost-user.rst), as far as a network card
//! without protocol features hears it.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use anyhow::{Context, bail, ensure};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::card::{Card, FEATURES, Region};

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;

/// Version 1, and that it is an answer.
const ANSWER: u32 = 1 | 4;
/// No message that is heard here is longer.
const LONGEST: usize = 4096;
/// With a queue's number in place of a descriptor: there is none, the queue is polled.
const WITHOUT_DESCRIPTOR: u64 = 0x100;

/// The connection.
pub(crate) struct Front(UnixStream);

/// A message: its number, its body and the descriptors beside it.
type Message = (u32, Vec<u8>, Vec<OwnedFd>);

/// A message's body.
struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn array<const N: usize>(&mut self) -> anyhow::Result<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk().context("QEMU says too little")?;
        self.0 = rest;
        Ok(*array)
    }

    fn word(&mut self) -> anyhow::Result<u32> {
        Ok(u32::from_ne_bytes(self.array()?))
    }

    fn long(&mut self) -> anyhow::Result<u64> {
        Ok(u64::from_ne_bytes(self.array()?))
    }
}

impl Front {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self(stream)
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.0
    }

    /// Hears one message, and does what it says; whether there was one.
    pub(crate) fn hear(&mut self, card: &mut Card) -> anyhow::Result<bool> {
        let Some((request, bytes, files)) = self.message()? else { return Ok(false) };
        let mut body = Body(&bytes);
        let mut files = files.into_iter();
        match request {
            // That there are protocol features, of which there is none: so queues are enabled one
            // by one.
            GET_FEATURES => self.answer(request, &FEATURES.to_ne_bytes())?,
            GET_PROTOCOL_FEATURES => self.answer(request, &0_u64.to_ne_bytes())?,
            SET_FEATURES => card.set_features(body.long()?),
            SET_OWNER | SET_PROTOCOL_FEATURES | SET_VRING_ERR => {}
            SET_MEM_TABLE => {
                let count = body.long()? as u32;
                let region = |_| {
                    let [guest, size, user, offset] =
                        [body.long()?, body.long()?, body.long()?, body.long()?];
                    let file = File::from(files.next().context("memory without a descriptor")?);
                    Ok(Region { guest, size, user, offset, file })
                };
                card.set_memory((0..count).map(region).collect::<anyhow::Result<_>>()?)?;
            }
            SET_VRING_NUM => card.ring(body.word()?)?.set_size(body.word()?)?,
            SET_VRING_BASE => card.ring(body.word()?)?.set_base(body.word()?)?,
            SET_VRING_ENABLE => {
                let (number, enabled) = (body.word()?, body.word()? == 1);
                card.ring(number)?.enabled = enabled;
            }
            SET_VRING_ADDR => {
                let (ring, _flags) = (body.word()?, body.word()?);
                let [table, used, available] = [body.long()?, body.long()?, body.long()?];
                card.set_addresses(ring, table, available, used)?;
            }
            GET_VRING_BASE => {
                let number = body.word()?;
                let base = card.ring(number)?.stop();
                let answer = [number.to_ne_bytes(), u32::from(base).to_ne_bytes()].concat();
                self.answer(request, &answer)?;
            }
            SET_VRING_KICK | SET_VRING_CALL => {
                let number = body.long()?;
                ensure!(number & WITHOUT_DESCRIPTOR == 0, "a queue is to be polled");
                let ring = card.ring(number as u32)?;
                let file = Some(files.next().context("a queue without a descriptor")?);
                match request == SET_VRING_KICK {
                    true => ring.start(file),
                    false => ring.call = file,
                }
            }
            other => bail!("QEMU sends message {other}, which was not agreed on"),
        }
        Ok(true)
    }

    /// The next message.
    fn message(&mut self) -> anyhow::Result<Option<Message>> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut header)];
        let received = recvmsg(&self.0, into, &mut control, RecvFlags::CMSG_CLOEXEC);
        let got = match received {
            // QEMU has ended, in whatever way.
            Ok(received) if received.bytes == 0 => return Ok(None),
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            received => received?.bytes,
        };
        let files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        let files: Vec<OwnedFd> = files.flatten().collect();
        self.0.read_exact(&mut header[got..])?;
        let mut words = Body(&header);
        let (request, _flags, size) = (words.word()?, words.word()?, words.word()? as usize);
        ensure!(size <= LONGEST, "QEMU sends a message of {size} bytes");
        let mut body = vec![0; size];
        self.0.read_exact(&mut body)?;
        Ok(Some((request, body, files)))
    }

    fn answer(&mut self, request: u32, body: &[u8]) -> anyhow::Result<()> {
        let header = [request, ANSWER, u32::try_from(body.len())?].map(u32::to_ne_bytes).concat();
        Ok(self.0.write_all(&[&header[..], body].concat())?)
    }
}
