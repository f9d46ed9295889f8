//! The tree against a sorted vector, and its nodes against their invariants.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    key: u64,
    tie: u32,
    end: u64,
}

impl Entry for Span {
    const OVERLAPS: bool = true;
    fn key(&self) -> u64 {
        self.key
    }
    fn tie(&self) -> u32 {
        self.tie
    }
    fn end(&self) -> u64 {
        self.end
    }
}

/// Checks everything below `node`; returns its depth and its entries in order.
fn check(node: &Seen<'_, Span>, is_root: bool) -> (usize, Vec<Span>) {
    match node {
        Seen::Leaf(leaf) => {
            let entries = leaf.entries[..leaf.len].to_vec();
            assert!(leaf.len > 0 || is_root);
            assert_eq!(leaf.keys.rank(u64::MAX), leaf.len);
            for (i, entry) in entries.iter().enumerate() {
                assert_eq!(leaf.keys.at(i), entry.key);
                assert!(entry.end - entry.key <= leaf.longest);
            }
            (0, entries)
        }
        Seen::Inner(inner) => {
            assert!(inner.len > usize::from(is_root));
            assert_eq!(inner.keys.rank(u64::MAX), inner.len);
            let below: Vec<_> =
                (0..inner.len).map(|number| check(&inner.child(number), false)).collect();
            for (number, (depth, entries)) in below.iter().enumerate() {
                assert_eq!(*depth, below[0].0);
                let end = entries.iter().map(|entry| entry.end).max().unwrap();
                let noted = (inner.keys.at(number), inner.ties[number], inner.ends[number]);
                assert_eq!(noted, (entries[0].key, entries[0].tie, end));
            }
            (below[0].0 + 1, below.into_iter().flat_map(|(_, entries)| entries).collect())
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 200 }))]
    #[test]
    fn behaves_like_a_sorted_vector(
        edits in prop::collection::vec(
            (0u8..4, 0u64..120, 0u32..6, 1u64..60),
            0..if cfg!(miri) { 60 } else { 900 },
        ),
        removes in 1u8..4,
        at in 0u64..200, len in 0u64..50,
    ) {
        let mut tree = Tree::<Span>::default();
        let mut model: Vec<Span> = Vec::new();
        let mut old: Vec<(Tree<Span>, Vec<Span>)> = Vec::new();
        for (i, (edit, key, tie, len)) in edits.into_iter().enumerate() {
            let span = Span { key, tie, end: key + len };
            match model.binary_search_by_key(&(key, tie), |span| (span.key, span.tie)) {
                Ok(position) if edit < removes => {
                    tree.remove(key, tie);
                    model.remove(position);
                }
                Ok(position) => {
                    tree.replace(span);
                    model[position] = span;
                }
                Err(position) => {
                    tree.insert(span);
                    model.insert(position, span);
                }
            }
            let expected = model.iter().copied().find(|s| (s.key, s.tie) == (key, tie));
            prop_assert_eq!(tree.exact(key, tie).copied(), expected);
            if i % 100 == 50 {
                old.push((tree.clone(), model.clone()));
            }
        }
        // States kept from earlier are as they were.
        old.push((tree, model));
        for (tree, model) in old {
            prop_assert_eq!(&check(&tree.root.see(), true).1, &model);
            prop_assert_eq!(tree.len(), model.len());
            let last = model.iter().copied().rfind(|span| span.key <= at && at < span.end);
            prop_assert_eq!(tree.holding(at).copied(), last);
            let mut found = Vec::new();
            let _ = tree.overlapping(at..at + len, &mut |span| {
                found.push(*span);
                ControlFlow::<()>::Continue(())
            });
            let expected: Vec<_> = model.iter().copied()
                .filter(|span| span.key < at + len && at < span.end && len > 0)
                .collect();
            prop_assert_eq!(found, expected);
        }
    }
}

#[test]
fn ascending_entries_fill_their_leaves() {
    let mut tree = Tree::<Span>::default();
    for key in 0..1000 {
        tree.insert(Span { key, tie: 0, end: key + 1 });
    }
    let (depth, entries) = check(&tree.root.see(), true);
    assert_eq!((depth, entries.len()), (3, 1000));
    for key in 0..1000 {
        tree.remove(key, 0);
    }
    assert_eq!(check(&tree.root.see(), true), (0, vec![]));
}
