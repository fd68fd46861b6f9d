//! The table of attached controllers, and the words for how they are.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use super::Ctrl;
use crate::nvme::options::Options;
use crate::reactor::Core;

/// All attached controllers, and the module's options.
#[derive(Default)]
pub struct Controllers {
    pub by_name: RefCell<BTreeMap<String, Rc<Ctrl>>>,
    pub options: RefCell<Options>,
    next_id: Cell<u64>,
}

impl Controllers {
    /// The table of the control core.
    pub fn of(core: &Core) -> Rc<Self> {
        core.local(Self::default)
    }

    /// The controller of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Rc<Ctrl>> {
        self.by_name.borrow().get(name).cloned()
    }

    pub(super) fn by_id(core: &Core, id: u64) -> Option<Rc<Ctrl>> {
        Self::of(core).by_name.borrow().values().find(|c| c.shared.id == id).cloned()
    }

    /// An identifier that was not used before.
    pub fn fresh_id(&self) -> u64 {
        self.next_id.set(self.next_id.get() + 1);
        self.next_id.get()
    }
}

/// How a controller is, in SPDK's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Enabled,
    Resetting,
    ReconnectDelayed,
    Failed,
    Deleting,
}

impl State {
    /// The word in RPC answers.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Resetting => "resetting",
            Self::ReconnectDelayed => "reconnect_is_delayed",
            Self::Failed => "failed",
            Self::Deleting => "deleting",
        }
    }
}
