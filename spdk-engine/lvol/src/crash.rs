//! Why a crash, at any moment, loses nothing that was promised.
//!
//! # What is promised
//! After a power cut at any moment the store opens; every volume is as before or after each operation that was in flight,
//! and as after each one that was answered; flushed data is intact; a volume reads as zeroes where nothing was written; no
//! cluster and no metadata page leaks or has two owners. The last is worked out by the recovery from what the root pages
//! name, so it is enough that at every moment, whatever subset of unflushed writes survives, the root pages on disk name
//! each cluster once (but for marked snapshots, below), and only clusters whose content is right.
//!
//! # What is assumed of the device
//! * A completed flush makes everything durable that had completed before it was sent. Without a volatile cache
//!   ([`crate::Device::write_cache`]) completed writes are durable, and no flush is sent.
//! * Any subset of the writes since may survive, in any order.
//! * **A metadata page is written whole or not at all.** Root pages, extent pages and the super block have their one place
//!   in the format and are rewritten there; a page that was torn within its 4096 bytes fails its CRC, and the format keeps
//!   no second copy of a root page. SPDK assumes the same. Devices with physical blocks of 4096 bytes keep it; stores on
//!   devices with larger ones get metadata pages of that size. A batch of pages may be torn between pages.
//!
//! # The five rules
//! 1. The super block says "in use" durably before any metadata changes, and "clean" only when masks and metadata are
//!    durable.
//! 2. What a page is about to name is durable before that page is written: data in a copied or zeroed cluster before its
//!    extent page, a new extent page and the rest of a chain before the root page.
//! 3. What nothing names any more is reused only when that is durable: the root page or extent page that dropped it comes
//!    first, then a flush, then clearing and giving back. I/O that may still use it has ended by then (grace).
//! 4. Changes of structure happen in one write of one root page, the commit. Extent pages whose number of entries or owner
//!    changes are written anew elsewhere and named by that root page; in place they are rewritten only to fill holes or to
//!    make them, where each entry stands for itself.
//! 5. Where two blobs change (snapshot, deletion of a snapshot), the snapshot bears a mark that names the other, durably,
//!    while both name the same clusters. The recovery asks the other whether it names the snapshot as its parent.
//!
//! # Operations
//! "F" is a flush, sent only to a device with a volatile cache. "Chain" is: pages of the chain but the root at unused
//! places, F, root page, F. For a chain of one page it is the root page and F. Each row starts after "super block: in
//! use, F", once per load.
//!
//! | Operation | Sequence | After a cut |
//! |---|---|---|
//! | format | super block zeroed, F; metadata zeroed, data cleared, F; super blob, F; super block, F | no store, or an empty one |
//! | create | (thick: clusters zeroed where unknown, F; extent pages); F; chain | without root page nothing names the rest |
//! | first write to a cluster | fill, F if anything was filled; extent page | hole or cluster with the same content |
//! | … without extent page | fill, F; extent page, F; chain | the same |
//! | unmap of whole clusters, thin without parent | hole in the map; grace; extent page, F; clear; give back | old data or zeroes |
//! | rename, attribute, read-only, new parent | chain | old or new |
//! | grow a volume | (thick: clusters zeroed, F); extent page of the border anew; F; chain; old page zeroed | old or new size |
//! | shrink | I/O held; extent page of the border anew; F; chain; I/O goes on; grace; clear, give back | old or new size |
//! | snapshot | I/O held; chain of the snapshot, with SNAPTMP, naming all clusters; chain of the volume, naming none but its parent; I/O goes on; chain of the snapshot, without mark, read-only | before the second chain: SNAPTMP, and the volume does not name the snapshot: its root is zeroed. After it: kept, mark dropped |
//! | clone | chain | exists or not |
//! | delete without clone | root page zeroed, F; grace; clear, give back; pages zeroed | whole or gone |
//! | delete with a clone | chain of the snapshot with SNAPRM; I/O of the clone held; merged extent pages anew; F; chain of the clone, naming what it inherits and its new parent; I/O goes on; root page of the snapshot zeroed, F; grace; clear what is left, give back | before the second chain: mark dropped. After it: the clone does not name the snapshot, whose root is zeroed |
//! | inflate, decouple | like first writes, cluster by cluster; then F, chain without parent | same content at every moment |
//! | grow the store | super block with the new size, F | old or new size |
//! | unload | masks, F; super block "clean", F | recovered, or clean |
//! | destroy | super block zeroed, F; clear | whole or gone |
//!
//! Repairs after a crash are such writes themselves (root page zeroed, F; extent page in place, F; chain) and are planned
//! from what is on disk, so that a second crash amid them only repeats them. They run before anything is allocated.
//!
//! An extent entry needs no flush of its own, though the write that caused it has been answered: until the user flushes,
//! both may be lost, and the hole then shows what it showed. The user's flush covers the extent page, which completed
//! before the data was sent. Zeroes that were read from a released cluster likewise hold only once flushed.
//!
//! # When a write fails
//! A metadata write that fails, or the flush after it, leaves open what is on disk. The page is written once more as it
//! was; when that succeeds nothing has happened, and what was taken is given back. When it fails as well, everything that
//! either version names stays reserved, and [`crate::Store::unload`] does not mark the store clean: the next load finds
//! out. After a failed flush nothing counts as durable that only that flush would have made so.
//!
//! # Zeroes
//! A cluster may hold old data: on a device whose unmap promises nothing, after a crash, or in a store of another writer.
//! So after a load no free cluster is taken for zeroes, and the first use of each costs an unmap where that reads as
//! zeroes, else writing zeroes, durable before the cluster is named. Clusters cleared since (at format, at release), and
//! flushed since, are known to be zero and cost nothing.
