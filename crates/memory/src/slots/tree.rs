//! A B+ tree whose states share what they have in common.
//!
//! The invariants: keys (then ties) ascend; all leaves are equally deep; each inner node knows the exact
//! first key and the greatest end below each child. A change copies the nodes on one path, unless nobody else
//! holds them, in which case it is made in place (`Arc::make_mut`): many changes between two publications
//! cost one copy of each node touched.
//!
//! Searching is made of comparisons that are summed up, not branched on: first the last key of each block of
//! eight keys (one cache line), then one block. Unused keys are `u64::MAX`, so that node sizes need no check.

use std::array;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

/// What a tree holds: ranges `key..end`.
pub(super) trait Entry: Copy + Default {
    /// Whether ranges in one tree may overlap.
    const OVERLAPS: bool;
    /// Where the range starts; less than `u64::MAX`.
    fn key(&self) -> u64;
    /// What tells entries of the same key apart.
    fn tie(&self) -> u32;
    /// Where the range ends.
    fn end(&self) -> u64;
}

/// Entries in a leaf at most; half of them at least, most of the time. Small in unit tests, so that few
/// entries make a deep tree; tests/slots.rs has the real sizes.
const LEAF: usize = if cfg!(test) { 8 } else { 64 };
/// Children of an inner node at most.
const FAN: usize = if cfg!(test) { 8 } else { 32 };
/// Nodes with fewer than this share of their capacity are merged with a neighbour if that leaves room.
const SPARSE: usize = 4;

#[derive(Clone, Debug)]
pub(super) struct Tree<E> {
    root: Arc<Node<E>>,
    len: usize,
}

#[derive(Clone, Debug)]
enum Node<E> {
    Leaf(Leaf<E>),
    Inner(Inner<E>),
}

#[derive(Clone, Debug)]
struct Leaf<E> {
    len: usize,
    keys: [u64; LEAF],
    ends: [u64; LEAF],
    entries: [E; LEAF],
}

#[derive(Clone, Debug)]
struct Inner<E> {
    len: usize,
    /// The first key below each child.
    keys: [u64; FAN],
    ties: [u32; FAN],
    /// The greatest end below each child.
    ends: [u64; FAN],
    children: [Option<Arc<Node<E>>>; FAN],
}

/// How many of `keys` are at most `key`.
#[inline(always)]
fn rank<const N: usize>(keys: &[u64; N], key: u64) -> usize {
    let (blocks, _) = keys.as_chunks::<8>();
    let before: usize = blocks.iter().map(|block| usize::from(block[7] <= key)).sum();
    let block = before.min(N / 8 - 1);
    block * 8 + blocks[block].iter().map(|k| usize::from(*k <= key)).sum::<usize>()
}

impl<E: Entry> Default for Tree<E> {
    fn default() -> Self {
        Self { root: Arc::new(Node::Leaf(Leaf::new())), len: 0 }
    }
}

impl<E: Entry> Tree<E> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The last entry of those whose range holds `at`.
    #[inline]
    pub(super) fn holding(&self, at: u64) -> Option<&E> {
        let (leaf, position) = self.floor(at)?;
        if leaf.ends[position] > at {
            return Some(&leaf.entries[position]);
        }
        if E::OVERLAPS { self.last_holding(at) } else { None }
    }

    #[cold]
    fn last_holding(&self, at: u64) -> Option<&E> {
        let mut last = None;
        let _ = self.root.overlapping(&(at..at + 1), &mut |entry| {
            last = Some(entry);
            ControlFlow::<()>::Continue(())
        });
        last
    }

    /// The entry of this key and tie.
    #[inline]
    pub(super) fn exact(&self, key: u64, tie: u32) -> Option<&E> {
        let mut node = &*self.root;
        loop {
            match node {
                Node::Inner(inner) => node = inner.child(inner.route(key, tie)),
                Node::Leaf(leaf) => {
                    let entry = &leaf.entries[leaf.rank_exact(key, tie).checked_sub(1)?];
                    return ((entry.key(), entry.tie()) == (key, tie)).then_some(entry);
                }
            }
        }
    }

    /// The last entry whose key is at most `key`.
    #[inline]
    fn floor(&self, key: u64) -> Option<(&Leaf<E>, usize)> {
        // Unused keys are never at most this.
        let key = key.min(u64::MAX - 1);
        let mut node = &*self.root;
        loop {
            match node {
                Node::Inner(inner) => node = inner.child(rank(&inner.keys, key).saturating_sub(1)),
                Node::Leaf(leaf) => {
                    let position = rank(&leaf.keys, key).checked_sub(1)?;
                    return Some((leaf, position));
                }
            }
        }
    }

    /// Calls `f` in order with the entries whose ranges have something of `range`, until it breaks.
    pub(super) fn overlapping<'a, B>(
        &'a self,
        range: Range<u64>,
        f: &mut impl FnMut(&'a E) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if range.is_empty() { ControlFlow::Continue(()) } else { self.root.overlapping(&range, f) }
    }

    /// Adds `entry`, whose key and tie must be new.
    pub(super) fn insert(&mut self, entry: E) {
        if let Some(right) = insert(&mut self.root, entry) {
            let mut root = Inner::new();
            let left = std::mem::replace(&mut self.root, Arc::clone(&right));
            root.put(0, left);
            root.put(1, right);
            self.root = Arc::new(Node::Inner(root));
        }
        self.len += 1;
    }

    /// Puts `entry` in place of the one of the same key and tie, which must exist.
    pub(super) fn replace(&mut self, entry: E) {
        replace(&mut self.root, entry);
    }

    /// Takes away the entry of this key and tie, which must exist.
    pub(super) fn remove(&mut self, key: u64, tie: u32) {
        remove(&mut self.root, key, tie);
        self.len -= 1;
        while let Node::Inner(Inner { len: 1, children, .. }) = &*self.root
            && let Some(only) = &children[0]
        {
            self.root = Arc::clone(only);
        }
    }
}

impl<E: Entry> Node<E> {
    /// Key and tie of the first entry, and the greatest end.
    fn bounds(&self) -> (u64, u32, u64) {
        match self {
            Self::Leaf(leaf) => {
                let first = &leaf.entries[0];
                let end = if E::OVERLAPS {
                    leaf.ends[..leaf.len].iter().copied().max().unwrap_or(0)
                } else {
                    leaf.ends[leaf.len.saturating_sub(1)]
                };
                (first.key(), first.tie(), end)
            }
            Self::Inner(inner) => {
                let end = inner.ends[..inner.len].iter().copied().max().unwrap_or(0);
                (inner.keys[0], inner.ties[0], end)
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Leaf(leaf) => leaf.len,
            Self::Inner(inner) => inner.len,
        }
    }

    fn overlapping<'a, B>(
        &'a self,
        range: &Range<u64>,
        f: &mut impl FnMut(&'a E) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        match self {
            Self::Leaf(leaf) => {
                let stop = rank(&leaf.keys, range.end - 1);
                // Without overlaps the ends ascend as the keys do.
                let from = if E::OVERLAPS { 0 } else { rank(&leaf.keys, range.start).saturating_sub(1) };
                for position in from..stop.min(leaf.len) {
                    if leaf.ends[position] > range.start {
                        f(&leaf.entries[position])?;
                    }
                }
            }
            Self::Inner(inner) => {
                let stop = rank(&inner.keys, range.end - 1);
                let from = if E::OVERLAPS { 0 } else { rank(&inner.keys, range.start).saturating_sub(1) };
                for number in from..stop.min(inner.len) {
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
        Self { len: 0, keys: [u64::MAX; LEAF], ends: [0; LEAF], entries: [E::default(); LEAF] }
    }

    /// How many entries are at most (`key`, `tie`).
    fn rank_exact(&self, key: u64, tie: u32) -> usize {
        let mut position = rank(&self.keys, key);
        while position > 0 && self.keys[position - 1] == key && self.entries[position - 1].tie() > tie {
            position -= 1;
        }
        position
    }

    fn write(&mut self, position: usize, entry: E) {
        self.keys[position] = entry.key();
        self.ends[position] = entry.end();
        self.entries[position] = entry;
    }

    fn insert(&mut self, position: usize, entry: E) {
        self.keys.copy_within(position..self.len, position + 1);
        self.ends.copy_within(position..self.len, position + 1);
        self.entries.copy_within(position..self.len, position + 1);
        self.write(position, entry);
        self.len += 1;
    }

    fn remove(&mut self, position: usize) {
        self.keys.copy_within(position + 1..self.len, position);
        self.ends.copy_within(position + 1..self.len, position);
        self.entries.copy_within(position + 1..self.len, position);
        self.len -= 1;
        self.keys[self.len] = u64::MAX;
    }

    /// Takes the entries from `position` on into a leaf of their own.
    fn split_off(&mut self, position: usize) -> Self {
        let mut right = Self::new();
        for entry in &self.entries[position..self.len] {
            right.write(right.len, *entry);
            right.len += 1;
        }
        self.keys[position..].fill(u64::MAX);
        self.len = position;
        right
    }

    fn append(&mut self, right: &Self) {
        for entry in &right.entries[..right.len] {
            self.write(self.len, *entry);
            self.len += 1;
        }
    }
}

impl<E: Entry> Inner<E> {
    fn new() -> Self {
        Self {
            len: 0,
            keys: [u64::MAX; FAN],
            ties: [0; FAN],
            ends: [0; FAN],
            children: array::from_fn(|_| None),
        }
    }

    #[inline]
    fn child(&self, number: usize) -> &Node<E> {
        match &self.children[number] {
            Some(child) => child,
            None => unreachable!("an inner node has no child {number} of {}", self.len),
        }
    }

    fn child_mut(&mut self, number: usize) -> &mut Arc<Node<E>> {
        match &mut self.children[number] {
            Some(child) => child,
            None => unreachable!("an inner node has no child {number} of {}", self.len),
        }
    }

    /// The child below which (`key`, `tie`) belongs.
    fn route(&self, key: u64, tie: u32) -> usize {
        let mut number = rank(&self.keys, key);
        while number > 0 && self.keys[number - 1] == key && self.ties[number - 1] > tie {
            number -= 1;
        }
        number.saturating_sub(1)
    }

    /// Writes down anew what is known of child `number`.
    fn note(&mut self, number: usize) {
        (self.keys[number], self.ties[number], self.ends[number]) = self.child(number).bounds();
    }

    /// Puts `child` before child `number`, or after the last.
    fn put(&mut self, number: usize, child: Arc<Node<E>>) {
        self.keys.copy_within(number..self.len, number + 1);
        self.ties.copy_within(number..self.len, number + 1);
        self.ends.copy_within(number..self.len, number + 1);
        self.children[number..=self.len].rotate_right(1);
        self.children[number] = Some(child);
        self.len += 1;
        self.note(number);
    }

    fn take(&mut self, number: usize) {
        self.keys.copy_within(number + 1..self.len, number);
        self.ties.copy_within(number + 1..self.len, number);
        self.ends.copy_within(number + 1..self.len, number);
        self.children[number..self.len].rotate_left(1);
        self.len -= 1;
        self.children[self.len] = None;
        self.keys[self.len] = u64::MAX;
    }

    fn split_off(&mut self, position: usize) -> Self {
        let mut right = Self::new();
        for number in position..self.len {
            if let Some(child) = self.children[number].take() {
                right.put(right.len, child);
            }
        }
        self.keys[position..].fill(u64::MAX);
        self.len = position;
        right
    }

    /// After child `number` has lost an entry: takes it away when it is empty, and merges it with a neighbour
    /// when it is sparse and both fit one node with room to spare.
    fn tidy(&mut self, number: usize) {
        let (len, capacity) = match self.child(number) {
            Node::Leaf(leaf) => (leaf.len, LEAF),
            Node::Inner(inner) => (inner.len, FAN),
        };
        if len == 0 {
            self.take(number);
            return;
        }
        self.note(number);
        if len >= capacity / SPARSE {
            return;
        }
        let left = if number + 1 < self.len { number } else { number.saturating_sub(1) };
        if left + 1 < self.len && self.child(left).len() + self.child(left + 1).len() <= capacity * 3 / 4 {
            let right = Arc::clone(self.child_mut(left + 1));
            match (Arc::make_mut(self.child_mut(left)), &*right) {
                (Node::Leaf(left), Node::Leaf(right)) => left.append(right),
                (Node::Inner(left), Node::Inner(right)) => {
                    for child in right.children.iter().flatten() {
                        left.put(left.len, Arc::clone(child));
                    }
                }
                _ => unreachable!("leaves are equally deep"),
            }
            self.take(left + 1);
            self.note(left);
        }
    }
}

/// Adds `entry` below `node`; when the node had to be split, returns its new right neighbour.
fn insert<E: Entry>(node: &mut Arc<Node<E>>, entry: E) -> Option<Arc<Node<E>>> {
    let (key, tie) = (entry.key(), entry.tie());
    match Arc::make_mut(node) {
        Node::Leaf(leaf) => {
            let position = leaf.rank_exact(key, tie);
            if leaf.len < LEAF {
                leaf.insert(position, entry);
                return None;
            }
            // Entries that come in ascending order leave full leaves behind.
            let split = if position == LEAF { LEAF } else { LEAF / 2 };
            let mut right = leaf.split_off(split);
            if position < split {
                leaf.insert(position, entry)
            } else {
                right.insert(position - split, entry)
            }
            Some(Arc::new(Node::Leaf(right)))
        }
        Node::Inner(inner) => {
            let number = inner.route(key, tie);
            let new = insert(inner.child_mut(number), entry);
            inner.note(number);
            let new = new?;
            let position = number + 1;
            if inner.len < FAN {
                inner.put(position, new);
                return None;
            }
            let split = if position == FAN { FAN } else { FAN / 2 };
            let mut right = inner.split_off(split);
            if position < split {
                inner.put(position, new)
            } else {
                right.put(position - split, new)
            }
            Some(Arc::new(Node::Inner(right)))
        }
    }
}

fn replace<E: Entry>(node: &mut Arc<Node<E>>, entry: E) {
    let (key, tie) = (entry.key(), entry.tie());
    match Arc::make_mut(node) {
        Node::Leaf(leaf) => {
            let position = leaf.rank_exact(key, tie) - 1;
            leaf.write(position, entry);
        }
        Node::Inner(inner) => {
            let number = inner.route(key, tie);
            replace(inner.child_mut(number), entry);
            inner.note(number);
        }
    }
}

fn remove<E: Entry>(node: &mut Arc<Node<E>>, key: u64, tie: u32) {
    match Arc::make_mut(node) {
        Node::Leaf(leaf) => {
            let position = leaf.rank_exact(key, tie) - 1;
            leaf.remove(position);
        }
        Node::Inner(inner) => {
            let number = inner.route(key, tie);
            remove(inner.child_mut(number), key, tie);
            inner.tidy(number);
        }
    }
}

#[cfg(test)]
mod tests;
