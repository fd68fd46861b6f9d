//! What a raid is made of and what follows from it: decisions without I/O.
//!
//! *What it is.* [`Array`] is one raid1: slots, counts, state, the superblock that its members carry. [`judge`] says what
//! to do with a superblock found on a device. Both only compute; [`super::control`] carries out.
//!
//! *Invariants.* `discovered` slots are configured; a raid goes online when as many are as are expected to work
//! (`operational`). A superblock's table only changes together with the slots, and is then written with a higher number.
//!
//! *When things fail.* Errors are the errnos that SPDK answers. A refused call has changed nothing, but for
//! [`Array::claimed`], which may have freed the slot's claim for the caller to drop.
//! Source: SPDK's raid module, and section 11 of the on-disk format.

use blobstore_format::raid::{self as format, Level, MemberState, RaidSuperblock};
use uuid::Uuid;

use crate::bdev::BdevInfo;

/// Most members.
pub const MEMBERS_MAX: usize = 255;

/// SPDK's three states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Online,
    Configuring,
    Offline,
}

impl State {
    /// The word in RPC.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Online => "online",
            Self::Configuring => "configuring",
            Self::Offline => "offline",
        }
    }
}

/// What belongs to one place in the raid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slot {
    /// The member's name as it was given, or as found.
    pub name: Option<String>,
    /// Nil while it is not known.
    pub uuid: Uuid,
    pub data_offset: u64,
    /// 0 while it is not known.
    pub data_size: u64,
    /// The member is claimed and counts.
    pub configured: bool,
    /// The member is being rebuilt.
    pub target: bool,
    /// The member is leaving.
    pub removing: bool,
}

/// What has become possible by a member's coming.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Came {
    /// Others are still missing.
    Waiting,
    /// All that are expected are there.
    Complete,
    /// It joins a raid that is online and must be rebuilt.
    Rebuild,
}

/// One raid1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Array {
    pub name: String,
    /// Nil until it is online, when none was given and there are no superblocks.
    pub uuid: Uuid,
    pub state: State,
    pub with_superblock: bool,
    pub superblock: Option<RaidSuperblock>,
    pub slots: Vec<Slot>,
    pub operational: usize,
    /// 0 until the first member is there.
    pub block_size: u32,
    pub num_blocks: u64,
}

impl Array {
    /// A raid of members that may be there or not.
    ///
    /// # Errors
    /// The errno for a name or a number of members that cannot be.
    pub fn create(name: &str, uuid: Option<Uuid>, members: &[String], with_superblock: bool) -> Result<Self, i32> {
        if name.is_empty() || name.len() > format::MAX_NAME || !(2..=MEMBERS_MAX).contains(&members.len()) {
            return Err(libc::EINVAL);
        }
        let given = uuid.filter(|u| !u.is_nil());
        let uuid = given.unwrap_or_else(|| if with_superblock { Uuid::new_v4() } else { Uuid::nil() });
        let slot = |name: &String| Slot { name: Some(name.clone()), ..Slot::default() };
        Ok(Self {
            name: name.to_owned(),
            uuid,
            state: State::Configuring,
            with_superblock,
            superblock: None,
            slots: members.iter().map(slot).collect(),
            operational: members.len(),
            block_size: 0,
            num_blocks: 0,
        })
    }

    /// The raid that a superblock describes, without any member yet.
    ///
    /// # Errors
    /// The errno for a level or a table that cannot be.
    pub fn from_superblock(superblock: &RaidSuperblock) -> Result<Self, i32> {
        let count = usize::from(superblock.num_base_bdevs);
        if superblock.level != Level::Raid1 || superblock.strip_size != 0 || count < 2 || superblock.name.is_empty() {
            return Err(libc::EINVAL);
        }
        let mut slots = vec![Slot::default(); count];
        let mut operational = 0;
        for entry in &superblock.members {
            let slot = slots.get_mut(usize::from(entry.slot)).ok_or(libc::EINVAL)?;
            if entry.state == MemberState::Configured {
                slot.uuid = entry.uuid;
                operational += 1;
            }
            slot.data_offset = entry.data_offset;
            slot.data_size = entry.data_size;
        }
        if operational == 0 {
            return Err(libc::EINVAL);
        }
        Ok(Self {
            name: superblock.name.clone(),
            uuid: superblock.uuid,
            state: State::Configuring,
            with_superblock: true,
            superblock: Some(superblock.clone()),
            slots,
            operational,
            block_size: 0,
            num_blocks: 0,
        })
    }

    /// Number of members that are there and count.
    #[must_use]
    pub fn discovered(&self) -> usize {
        self.slots.iter().filter(|s| s.configured).count()
    }

    /// Number of members that are there and not leaving.
    #[must_use]
    pub fn staying(&self) -> usize {
        self.slots.iter().filter(|s| s.configured && !s.removing).count()
    }

    /// Whether a member may leave for having failed: not the last whole one.
    #[must_use]
    pub fn can_lose(&self, slot: usize) -> bool {
        let whole = |(index, s): (usize, &Slot)| index != slot && s.configured && !s.removing && !s.target;
        self.slots.iter().enumerate().any(whole)
    }

    /// The slot that a device of that name or identity is awaited in, without looking at its contents.
    #[must_use]
    pub fn awaits(&self, is_called: impl Fn(&str) -> bool, uuid: Uuid) -> Option<usize> {
        if self.state != State::Configuring || self.superblock.is_some() {
            return None;
        }
        let wants = |s: &Slot| !s.configured && (s.name.as_deref().is_some_and(&is_called) || s.uuid == uuid);
        self.slots.iter().position(wants)
    }

    /// The slot for a device that a call adds.
    ///
    /// # Errors
    /// EINVAL when none is free.
    pub fn slot_for_new(&self, uuid: Option<Uuid>) -> Result<usize, i32> {
        let known = |s: &Slot| s.name.is_none() && Some(s.uuid) == uuid;
        let free = |s: &Slot| s.name.is_none() && s.uuid.is_nil();
        let by_uuid = (self.state == State::Configuring).then(|| self.slots.iter().position(known)).flatten();
        by_uuid.or_else(|| self.slots.iter().position(free)).ok_or(libc::EINVAL)
    }

    /// Checks a device for a slot and takes up what is known of it; the caller has claimed it.
    ///
    /// # Errors
    /// EINVAL when its geometry does not fit.
    pub fn claimed(&mut self, index: usize, info: &BdevInfo) -> Result<(), i32> {
        let with_superblock = self.with_superblock;
        let (known_block_size, slot) = (self.block_size, self.slots.get_mut(index).ok_or(libc::EINVAL)?);
        let offset = if with_superblock { data_offset(slot.data_offset, info) } else { slot.data_offset };
        let fits = offset < info.num_blocks
            && offset.checked_add(slot.data_size).is_some_and(|end| end <= info.num_blocks)
            && (known_block_size == 0 || known_block_size == info.block_size)
            && (slot.uuid.is_nil() || slot.uuid == info.uuid);
        if !fits {
            tracing::error!(raid = self.name, member = info.name, "the device does not fit the raid");
            return Err(libc::EINVAL);
        }
        slot.data_offset = offset;
        if slot.data_size == 0 {
            slot.data_size = info.num_blocks - offset;
        }
        slot.uuid = info.uuid;
        slot.name.get_or_insert_with(|| info.name.clone());
        self.block_size = info.block_size;
        Ok(())
    }

    /// A claimed member now counts.
    pub fn configured(&mut self, index: usize) -> Came {
        let joins_late = self.state == State::Online;
        let slot = &mut self.slots[index];
        slot.configured = true;
        if joins_late {
            slot.target = true;
            self.operational += 1;
            return Came::Rebuild;
        }
        if self.discovered() == self.operational { Came::Complete } else { Came::Waiting }
    }

    /// Sizes the raid by its members and makes the superblock, or checks the one there is.
    ///
    /// # Errors
    /// EINVAL when the members contradict the superblock.
    pub fn start(&mut self) -> Result<(), i32> {
        let sizes = self.slots.iter().map(|s| s.data_size).filter(|size| *size != 0);
        let blocks = sizes.min().ok_or(libc::EINVAL)?;
        for slot in &mut self.slots {
            slot.data_size = blocks;
        }
        self.num_blocks = blocks;
        if !self.with_superblock {
            if self.uuid.is_nil() {
                self.uuid = Uuid::new_v4();
            }
            return Ok(());
        }
        match &self.superblock {
            Some(sb) if sb.block_size != self.block_size || sb.raid_size != blocks => {
                tracing::error!(
                    raid = self.name,
                    blocks,
                    block_size = self.block_size,
                    "the superblock says {} blocks of {} bytes",
                    sb.raid_size,
                    sb.block_size
                );
                Err(libc::EINVAL)
            }
            Some(_) => Ok(()),
            None => {
                self.superblock = Some(self.first_superblock());
                Ok(())
            }
        }
    }

    fn first_superblock(&self) -> RaidSuperblock {
        let entry = |(slot, s): (usize, &Slot)| {
            format::Member::new(s.uuid, s.data_offset, s.data_size, MemberState::Configured, slot as u8)
        };
        let members = self.slots.iter().enumerate().map(entry).collect();
        let (name, block_size) = (self.name.clone(), self.block_size);
        let mut superblock = RaidSuperblock::new(self.uuid, name, Level::Raid1, block_size, 0, members);
        superblock.raid_size = self.num_blocks;
        superblock
    }

    /// Books that a slot's member leaves or has failed; true when the superblock has changed by it.
    pub fn book_leaving(&mut self, index: usize, failed: bool) -> bool {
        let Some(sb) = &mut self.superblock else { return false };
        let here = |b: &&mut format::Member| usize::from(b.slot) == index && b.state == MemberState::Configured;
        let Some(entry) = sb.members.iter_mut().find(here) else { return false };
        entry.state = if failed { MemberState::Failed } else { MemberState::Missing };
        true
    }

    /// Forgets the member of a slot, whose claim the caller drops.
    pub fn free(&mut self, index: usize) {
        let keeps_uuid = self.state == State::Configuring;
        let slot = &mut self.slots[index];
        slot.name = None;
        if !keeps_uuid {
            slot.uuid = Uuid::nil();
        }
        slot.data_offset = 0;
        (slot.configured, slot.target, slot.removing) = (false, false, false);
    }

    /// A member has left a raid that was online; whether enough are left.
    pub fn lost(&mut self) -> bool {
        self.operational = self.operational.saturating_sub(1);
        self.operational > 0
    }

    /// Books that the slot being rebuilt is whole.
    pub fn book_rebuilt(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.target = false;
        let slot = slot.clone();
        if let Some(sb) = &mut self.superblock
            && let Some(entry) = sb.members.iter_mut().find(|b| usize::from(b.slot) == index)
        {
            entry.state = MemberState::Configured;
            entry.uuid = slot.uuid;
            entry.data_offset = slot.data_offset;
            entry.data_size = slot.data_size;
        }
    }

    /// Takes up the members' sizes (`blocks` of each, by slot); the new size when it has grown. A raid never shrinks
    /// while it is online, as its users have it open.
    pub fn resize(&mut self, blocks: &[Option<u64>]) -> Option<u64> {
        let data = |(slot, blocks): (&Slot, &Option<u64>)| blocks.map(|b| b.saturating_sub(slot.data_offset));
        let least = self.slots.iter().zip(blocks).filter_map(data).min()?;
        if least <= self.num_blocks {
            return None;
        }
        self.num_blocks = least;
        for slot in &mut self.slots {
            slot.data_size = least;
        }
        if let Some(sb) = &mut self.superblock {
            sb.raid_size = least;
            sb.members.iter_mut().for_each(|entry| entry.data_size = least);
        }
        Some(least)
    }
}

fn data_offset(known: u64, info: &BdevInfo) -> u64 {
    if known != 0 {
        return known;
    }
    let least = format::MIN_DATA_OFFSET / u64::from(info.block_size);
    match u64::from(info.optimal_io_boundary) {
        0 => least,
        boundary => least.next_multiple_of(boundary),
    }
}

/// What to do with a superblock that was found on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// Nothing, for this errno.
    Leave(i32),
    /// Make the raid anew from this superblock, forgetting what is known of it; the device is the member of that slot,
    /// or of none when it is not a whole one.
    Make { slot: Option<usize> },
    /// The device is the member of that slot of the raid that is known.
    Join { slot: usize },
    /// The device was a member of that slot of the raid, which is online without it.
    Rejoin { slot: usize },
}

/// Decides about a superblock on a device; `known` is the raid of that UUID, if there is one.
#[must_use]
pub fn judge(found: &RaidSuperblock, device: &BdevInfo, known: Option<&Array>) -> Judgement {
    if found.block_size != device.block_size || found.uuid.is_nil() {
        return Judgement::Leave(libc::EINVAL);
    }
    let Some(known) = known else { return judge_by(found, device, None) };
    let Some(ours) = &known.superblock else { return Judgement::Leave(libc::EINVAL) };
    if found.seq_number > ours.seq_number {
        return if known.state == State::Configuring {
            judge_by(found, device, None)
        } else {
            Judgement::Leave(libc::EBUSY)
        };
    }
    judge_by(ours, device, Some(known))
}

/// Decides by the newest table.
fn judge_by(table: &RaidSuperblock, device: &BdevInfo, known: Option<&Array>) -> Judgement {
    let Some(entry) = table.members.iter().find(|b| b.uuid == device.uuid) else {
        return Judgement::Leave(libc::EINVAL);
    };
    let slot = usize::from(entry.slot);
    let configured = entry.state == MemberState::Configured;
    match known {
        None => Judgement::Make { slot: configured.then_some(slot) },
        Some(array) => match (array.state, array.slots.get(slot)) {
            (_, None) | (State::Offline, _) => Judgement::Leave(libc::EINVAL),
            (_, Some(s)) if s.configured => Judgement::Leave(libc::EEXIST),
            (State::Online, Some(s)) if s.name.is_none() && !configured => Judgement::Rejoin { slot },
            (State::Online, Some(_)) => Judgement::Leave(libc::EBUSY),
            (State::Configuring, Some(_)) if configured => Judgement::Join { slot },
            (State::Configuring, Some(_)) => Judgement::Leave(libc::EINVAL),
        },
    }
}
