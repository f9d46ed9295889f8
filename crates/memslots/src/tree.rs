//! A B+ tree whose states share what they have in common.
//!
//! The invariants: keys (then ties) ascend; all leaves are equally deep; each inner node knows the
//! exact first key and the greatest end below each child. A change copies the nodes on one path,
//! unless nobody else holds them, in which case it is made in place (`Arc::make_mut`): many changes
//! between two publications cost one copy of each node touched.
//!
//! The sizes weigh three costs. Copying an inner node takes a locked increment for each child, in
//! as many cache lines, and a decrement when the old state goes; copying a leaf is a plain copy. A
//! look-up pays for each cache line on its way (see `keys.rs`) and for each level. With 96 entries
//! in a leaf and 32 children, 32,764 slots added in random order make three levels. Inner nodes
//! stay under 1 KiB, up to which malloc hands out what the same thread has freed without a search;
//! for the same reason nothing is aligned to cache lines.

use std::array;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use keys::Keys;

mod keys;

/// What a tree holds: ranges `key..end`.
pub(crate) trait Entry: Copy + Default {
    /// Whether ranges in one tree may overlap.
    const OVERLAPS: bool;
    /// Where the range starts; less than `u64::MAX`.
    fn key(&self) -> u64;
    /// What tells entries of the same key apart.
    fn tie(&self) -> u32;
    /// Where the range ends.
    fn end(&self) -> u64;
}

/// Blocks of eight keys in a leaf. Small in unit tests, so that few entries make a deep tree;
/// tests/slots.rs has the real sizes.
const LEAF_BLOCKS: usize = if cfg!(test) { 1 } else { 12 };
/// Entries in a leaf at most; half of them at least, most of the time.
const LEAF: usize = LEAF_BLOCKS * 8;
/// Blocks of eight keys in an inner node.
const FAN_BLOCKS: usize = if cfg!(test) { 1 } else { 4 };
/// Children of an inner node at most.
const FAN: usize = FAN_BLOCKS * 8;
/// Nodes with fewer than this share of their capacity are merged with a neighbour if that leaves
/// room.
const SPARSE: usize = 4;

#[derive(Clone, Debug)]
pub(crate) struct Tree<E> {
    root: Node<E>,
    len: usize,
}

#[derive(Clone, Debug)]
enum Node<E> {
    Leaf(Arc<Leaf<E>>),
    Inner(Arc<Inner<E>>),
}

/// `Copy`, so that `Arc::make_mut` copies it once: a clone would be made on the stack and moved.
#[derive(Clone, Copy, Debug)]
struct Leaf<E> {
    len: usize,
    /// No entry is longer, from key to end; what was removed since may have been.
    longest: u64,
    keys: Keys<LEAF_BLOCKS>,
    entries: [E; LEAF],
}

#[derive(Clone, Debug)]
struct Inner<E> {
    len: usize,
    /// The first key below each child.
    keys: Keys<FAN_BLOCKS>,
    ties: [u32; FAN],
    /// The greatest end below each child.
    ends: [u64; FAN],
    children: Children<E>,
}

/// All of one kind: eight bytes each, not sixteen.
#[derive(Clone, Debug)]
enum Children<E> {
    Leaves([Option<Arc<Leaf<E>>>; FAN]),
    Inners([Option<Arc<Inner<E>>>; FAN]),
}

/// A node that is looked at.
enum Seen<'a, E> {
    Leaf(&'a Leaf<E>),
    Inner(&'a Inner<E>),
}

impl<E: Entry> Default for Tree<E> {
    fn default() -> Self {
        Self { root: Node::Leaf(Arc::new(Leaf::new())), len: 0 }
    }
}

impl<E: Entry> Tree<E> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The last entry of those whose range holds `at`.
    #[inline]
    pub(crate) fn holding(&self, at: u64) -> Option<&E> {
        let entry = self.floor(at)?;
        if entry.end() > at {
            return Some(entry);
        }
        if E::OVERLAPS { self.last_holding(at) } else { None }
    }

    #[cold]
    fn last_holding(&self, at: u64) -> Option<&E> {
        let mut last = None;
        let _ = self.root.see().overlapping(&(at..at + 1), &mut |entry| {
            last = Some(entry);
            ControlFlow::<()>::Continue(())
        });
        last
    }

    /// The entry of this key and tie.
    #[inline]
    pub(crate) fn exact(&self, key: u64, tie: u32) -> Option<&E> {
        let mut node = self.root.see();
        loop {
            match node {
                Seen::Inner(inner) => node = inner.child(inner.route(key, tie)),
                Seen::Leaf(leaf) => {
                    let entry = &leaf.entries[leaf.rank_exact(key, tie).checked_sub(1)?];
                    return ((entry.key(), entry.tie()) == (key, tie)).then_some(entry);
                }
            }
        }
    }

    /// The last entry whose key is at most `key`.
    #[inline]
    fn floor(&self, key: u64) -> Option<&E> {
        let mut node = self.root.see();
        loop {
            match node {
                Seen::Inner(inner) => node = inner.child(inner.keys.rank(key).saturating_sub(1)),
                Seen::Leaf(leaf) => {
                    return Some(&leaf.entries[leaf.keys.rank(key).checked_sub(1)?]);
                }
            }
        }
    }

    /// Calls `f` in order with the entries whose ranges have something of `range`, until it breaks.
    pub(crate) fn overlapping<'a, B>(
        &'a self,
        range: Range<u64>,
        f: &mut impl FnMut(&'a E) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if range.is_empty() {
            ControlFlow::Continue(())
        } else {
            self.root.see().overlapping(&range, f)
        }
    }

    /// Adds `entry`, whose key and tie must be new.
    pub(crate) fn insert(&mut self, entry: E) {
        let right = match &mut self.root {
            Node::Leaf(leaf) => Arc::make_mut(leaf).add(entry).map(Node::leaf),
            Node::Inner(inner) => Arc::make_mut(inner).add(entry).map(Node::inner),
        };
        if let Some(right) = right {
            let mut root = Inner::new(&right);
            root.put(0, self.root.clone());
            root.put(1, right);
            self.root = Node::inner(root);
        }
        self.len += 1;
    }

    /// Puts `entry` in place of the one of the same key and tie, which must exist.
    pub(crate) fn replace(&mut self, entry: E) {
        match &mut self.root {
            Node::Leaf(leaf) => Arc::make_mut(leaf).replace(entry),
            Node::Inner(inner) => Arc::make_mut(inner).replace(entry),
        }
    }

    /// Takes away the entry of this key and tie, which must exist.
    pub(crate) fn remove(&mut self, key: u64, tie: u32) {
        match &mut self.root {
            Node::Leaf(leaf) => Arc::make_mut(leaf).remove(key, tie),
            Node::Inner(inner) => Arc::make_mut(inner).remove(key, tie),
        }
        self.len -= 1;
        while let Node::Inner(inner) = &self.root
            && inner.len == 1
        {
            self.root = inner.handle(0);
        }
    }
}

impl<E: Entry> Node<E> {
    fn leaf(leaf: Leaf<E>) -> Self {
        Self::Leaf(Arc::new(leaf))
    }

    fn inner(inner: Inner<E>) -> Self {
        Self::Inner(Arc::new(inner))
    }

    #[inline(always)]
    fn see(&self) -> Seen<'_, E> {
        match self {
            Self::Leaf(leaf) => Seen::Leaf(leaf),
            Self::Inner(inner) => Seen::Inner(inner),
        }
    }
}

impl<'a, E: Entry> Seen<'a, E> {
    /// Key and tie of the first entry, and the greatest end.
    fn bounds(&self) -> (u64, u32, u64) {
        match self {
            Self::Leaf(leaf) => {
                let first = &leaf.entries[0];
                let end = if E::OVERLAPS {
                    leaf.entries[..leaf.len].iter().map(E::end).max().unwrap_or(0)
                } else {
                    leaf.entries[leaf.len.saturating_sub(1)].end()
                };
                (first.key(), first.tie(), end)
            }
            Self::Inner(inner) => {
                let end = inner.ends[..inner.len].iter().copied().max().unwrap_or(0);
                (inner.keys.first(), inner.ties[0], end)
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Leaf(leaf) => leaf.len,
            Self::Inner(inner) => inner.len,
        }
    }

    fn overlapping<B>(
        &self,
        range: &Range<u64>,
        f: &mut impl FnMut(&'a E) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        match self {
            Self::Leaf(leaf) => {
                let stop = leaf.keys.rank(range.end - 1);
                // What starts too early to reach the range need not be looked at.
                let from =
                    range.start.checked_sub(leaf.longest).map_or(0, |bound| leaf.keys.rank(bound));
                for entry in &leaf.entries[from..stop] {
                    if entry.end() > range.start {
                        f(entry)?;
                    }
                }
            }
            Self::Inner(inner) => {
                for number in 0..inner.keys.rank(range.end - 1) {
                    if inner.ends[number] > range.start {
                        inner.child(number).overlapping(range, f)?;
                    }
                }
            }
        }
        ControlFlow::Continue(())
    }
}

impl<E: Entry> Leaf<E> {
    fn new() -> Self {
        Self { len: 0, longest: 0, keys: Keys::new(), entries: [E::default(); LEAF] }
    }

    /// How many entries are at most (`key`, `tie`).
    fn rank_exact(&self, key: u64, tie: u32) -> usize {
        let mut position = self.keys.rank(key);
        while position > 0
            && (self.entries[position - 1].key(), self.entries[position - 1].tie()) > (key, tie)
        {
            position -= 1;
        }
        position
    }

    /// Adds `entry`; when the leaf had to be split, returns its new right neighbour.
    fn add(&mut self, entry: E) -> Option<Self> {
        let position = self.rank_exact(entry.key(), entry.tie());
        if self.len < LEAF {
            self.insert(position, entry);
            return None;
        }
        // Entries that come in ascending order leave full leaves behind.
        let split = if position == LEAF { LEAF } else { LEAF / 2 };
        let mut right = self.split_off(split);
        if position < split {
            self.insert(position, entry)
        } else {
            right.insert(position - split, entry)
        }
        Some(right)
    }

    fn replace(&mut self, entry: E) {
        let position = self.rank_exact(entry.key(), entry.tie()) - 1;
        self.put(position, entry);
    }

    fn remove(&mut self, key: u64, tie: u32) {
        let position = self.rank_exact(key, tie) - 1;
        self.keys.remove(position, self.len);
        self.entries.copy_within(position + 1..self.len, position);
        self.len -= 1;
    }

    fn insert(&mut self, position: usize, entry: E) {
        self.keys.insert(position, self.len, entry.key());
        self.entries.copy_within(position..self.len, position + 1);
        self.len += 1;
        self.put(position, entry);
    }

    fn put(&mut self, position: usize, entry: E) {
        self.entries[position] = entry;
        self.longest = self.longest.max(entry.end() - entry.key());
    }

    /// Takes the entries from `position` on into a leaf of their own.
    fn split_off(&mut self, position: usize) -> Self {
        let mut right = Self::new();
        for entry in &self.entries[position..self.len] {
            right.insert(right.len, *entry);
        }
        self.keys.truncate(position);
        self.len = position;
        right
    }

    fn append(&mut self, right: &Self) {
        for entry in &right.entries[..right.len] {
            self.insert(self.len, *entry);
        }
    }
}

impl<E: Entry> Inner<E> {
    /// A node without children, to have some like `child`.
    fn new(child: &Node<E>) -> Self {
        let children = match child {
            Node::Leaf(_) => Children::Leaves(array::from_fn(|_| None)),
            Node::Inner(_) => Children::Inners(array::from_fn(|_| None)),
        };
        Self { len: 0, keys: Keys::new(), ties: [0; FAN], ends: [0; FAN], children }
    }

    #[inline(always)]
    fn child(&self, number: usize) -> Seen<'_, E> {
        match &self.children {
            Children::Leaves(leaves) => Seen::Leaf(there(leaves[number].as_deref())),
            Children::Inners(inners) => Seen::Inner(there(inners[number].as_deref())),
        }
    }

    fn handle(&self, number: usize) -> Node<E> {
        match &self.children {
            Children::Leaves(leaves) => Node::Leaf(Arc::clone(there(leaves[number].as_ref()))),
            Children::Inners(inners) => Node::Inner(Arc::clone(there(inners[number].as_ref()))),
        }
    }

    /// Changes child `number` by the one function or the other, and notes down what is known of it.
    fn edit<T>(
        &mut self,
        number: usize,
        leaf: impl FnOnce(&mut Leaf<E>) -> T,
        inner: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let result = match &mut self.children {
            Children::Leaves(leaves) => leaf(Arc::make_mut(there(leaves[number].as_mut()))),
            Children::Inners(inners) => inner(Arc::make_mut(there(inners[number].as_mut()))),
        };
        self.note(number);
        result
    }

    /// The child below which (`key`, `tie`) belongs.
    fn route(&self, key: u64, tie: u32) -> usize {
        let mut number = self.keys.rank(key);
        while number > 0 && self.keys.at(number - 1) == key && self.ties[number - 1] > tie {
            number -= 1;
        }
        number.saturating_sub(1)
    }

    fn add(&mut self, entry: E) -> Option<Self> {
        let number = self.route(entry.key(), entry.tie());
        let new = self.edit(
            number,
            |leaf| leaf.add(entry).map(Node::leaf),
            |inner| inner.add(entry).map(Node::inner),
        )?;
        let position = number + 1;
        if self.len < FAN {
            self.put(position, new);
            return None;
        }
        let split = if position == FAN { FAN } else { FAN / 2 };
        let mut right = Self::new(&new);
        for number in split..self.len {
            right.put(right.len, self.handle(number));
        }
        while self.len > split {
            self.take(self.len - 1);
        }
        if position < split {
            self.put(position, new)
        } else {
            right.put(position - split, new)
        }
        Some(right)
    }

    fn replace(&mut self, entry: E) {
        let number = self.route(entry.key(), entry.tie());
        self.edit(number, |leaf| leaf.replace(entry), |inner| inner.replace(entry));
    }

    fn remove(&mut self, key: u64, tie: u32) {
        let number = self.route(key, tie);
        self.edit(number, |leaf| leaf.remove(key, tie), |inner| inner.remove(key, tie));
        self.tidy(number);
    }

    fn note(&mut self, number: usize) {
        let (key, tie, end) = self.child(number).bounds();
        self.keys.set(number, key);
        self.ties[number] = tie;
        self.ends[number] = end;
    }

    /// Puts `child` before child `number`, or after the last.
    fn put(&mut self, number: usize, child: Node<E>) {
        self.keys.insert(number, self.len, 0);
        self.ties.copy_within(number..self.len, number + 1);
        self.ends.copy_within(number..self.len, number + 1);
        let moved = number..self.len + 1;
        match (&mut self.children, child) {
            (Children::Leaves(leaves), Node::Leaf(leaf)) => {
                leaves[moved].rotate_right(1);
                leaves[number] = Some(leaf);
            }
            (Children::Inners(inners), Node::Inner(inner)) => {
                inners[moved].rotate_right(1);
                inners[number] = Some(inner);
            }
            _ => unreachable!("leaves are equally deep"),
        }
        self.len += 1;
        self.note(number);
    }

    fn take(&mut self, number: usize) {
        self.keys.remove(number, self.len);
        self.ties.copy_within(number + 1..self.len, number);
        self.ends.copy_within(number + 1..self.len, number);
        let moved = number..self.len;
        self.len -= 1;
        match &mut self.children {
            Children::Leaves(leaves) => {
                leaves[moved].rotate_left(1);
                leaves[self.len] = None;
            }
            Children::Inners(inners) => {
                inners[moved].rotate_left(1);
                inners[self.len] = None;
            }
        }
    }

    /// After child `number` has lost an entry: takes it away when it is empty, and merges it with a
    /// neighbour when it is sparse and both fit one node with room to spare.
    fn tidy(&mut self, number: usize) {
        let capacity = if matches!(self.children, Children::Leaves(_)) { LEAF } else { FAN };
        let len = self.child(number).len();
        if len == 0 {
            self.take(number);
            return;
        }
        let left = if number + 1 < self.len { number } else { number.saturating_sub(1) };
        if len >= capacity / SPARSE
            || left + 1 >= self.len
            || self.child(left).len() + self.child(left + 1).len() > capacity * 3 / 4
        {
            return;
        }
        match self.handle(left + 1) {
            Node::Leaf(right) => self.edit(left, |left| left.append(&right), |_| ()),
            Node::Inner(right) => self.edit(
                left,
                |_| (),
                |left| (0..right.len).for_each(|number| left.put(left.len, right.handle(number))),
            ),
        }
        self.take(left + 1);
    }
}

/// The child that the search has found; keys and children go together.
#[inline(always)]
fn there<T>(child: Option<T>) -> T {
    match child {
        Some(child) => child,
        None => unreachable!("an inner node has a key without a child"),
    }
}

#[cfg(test)]
mod tests;
