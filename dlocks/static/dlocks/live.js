"use strict";
// Refresh the parts of the control room, and change only the elements that differ. The focus, a selection and a pending
// click stay in place. Without this script, the page reloads itself.
{
    const room = document.querySelector(".dlocks-room");
    const pause = document.getElementById("dlocks-pause");
    const trouble = document.getElementById("dlocks-trouble");
    const texts = {false: pause.textContent, true: pause.dataset.resume};
    let stopped = false;
    const parts = [...room.querySelectorAll("[data-part]")].map((section) => ({section, timer: null, busy: false}));

    // Make an element equal to a fresh one. Children with an id are matched by it, the others by their position.
    const renew = (old, fresh) => {
        if (old.isEqualNode(fresh)) {
            return;
        }
        if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
            old.replaceWith(fresh);
            return;
        }
        for (const {name} of [...old.attributes]) {
            if (!fresh.hasAttribute(name)) {
                old.removeAttribute(name);
            }
        }
        for (const {name, value} of fresh.attributes) {
            if (old.getAttribute(name) !== value) {
                old.setAttribute(name, value);
            }
        }
        renewChildren(old, fresh);
    };

    // Django's rows have no id. The one of their key identifies them.
    const idOf = (child) => child.id || (child.nodeName === "TR" && child.querySelector("[id^=lock-]")?.id);

    const renewChildren = (old, fresh) => {
        const stay = new Set([...fresh.children].map(idOf));
        for (const child of [...old.children]) {
            if (idOf(child) && !stay.has(idOf(child))) {
                child.remove();
            }
        }
        const known = new Map([...old.children].filter(idOf).map((child) => [idOf(child), child]));
        let at = old.firstChild;
        for (const child of [...fresh.childNodes]) {
            const mine = idOf(child) ? known.get(idOf(child)) : at && !idOf(at) && at.nodeName === child.nodeName ? at : null;
            if (mine === at && mine) {
                at = at.nextSibling;
            } else {
                old.insertBefore(mine || child, at);
            }
            if (mine) {
                renew(mine, child);
            }
        }
        while (at) {
            const next = at.nextSibling;
            at.remove();
            at = next;
        }
    };

    // Let Django's script for actions see the rows that appear later.
    const selectable = {
        get length() { return [...this].length; },
        forEach(act) { [...this].forEach(act); },
        [Symbol.iterator]: () => room.querySelectorAll("tr input.action-select").values(),
    };
    const bodies = new WeakSet();
    const prepareActions = () => {
        const body = room.querySelector("#result_list tbody");
        if (body && window.Actions && document.getElementById("action-toggle") && !bodies.has(body)) {
            bodies.add(body);
            window.Actions(selectable);
        }
    };
    document.addEventListener("DOMContentLoaded", prepareActions);
    const isSelecting = () => room.querySelector("#result_list :checked");

    const show = (section, text) => {
        const inside = section.contains(document.activeElement) ? document.activeElement : null;
        // The content of a template element is inert: it loads and runs nothing.
        const fresh = document.createElement("template");
        fresh.innerHTML = text;
        renewChildren(section, fresh.content);
        prepareActions();
        if (inside && document.activeElement !== inside) {
            // The focused element was moved or removed. If it is gone, focus the part, so that Tab continues there.
            (document.getElementById(inside.id) || section).focus({preventScroll: true});
        }
    };

    // Show why the page is out of date, or that it is not.
    const report = (cause) => {
        room.classList.toggle("dlocks-old", Boolean(cause));
        for (const line of trouble.children) {
            line.hidden = line.dataset.cause !== cause;
        }
    };

    const refresh = async (part) => {
        if (part.busy) {
            return;
        }
        if (isSelecting()) {
            later(part, part.section.dataset.every * 1000);
            return;
        }
        clearTimeout(part.timer);
        part.busy = true;
        const began = performance.now();
        try {
            const response = await fetch(part.section.dataset.part, {signal: AbortSignal.timeout(20000)});
            if (response.redirected || response.status === 403) {
                report("session");
            } else if (!response.ok) {
                throw new Error(response.statusText);
            } else {
                const text = await response.text();
                if (!isSelecting()) {
                    show(part.section, text);
                }
                report();
            }
        } catch {
            report("server");
        }
        part.busy = false;
        // Poll a slow server less often.
        later(part, Math.max(part.section.dataset.every * 1000, 10 * (performance.now() - began)));
    };

    const paused = () => document.hidden || stopped;

    const later = (part, milliseconds) => {
        clearTimeout(part.timer);
        if (!paused()) {
            part.timer = setTimeout(refresh, milliseconds, part);
        }
    };

    const goOn = () => parts.forEach((part) => (paused() ? clearTimeout(part.timer) : refresh(part)));

    pause.hidden = false;
    pause.addEventListener("click", () => {
        stopped = !stopped;
        pause.textContent = texts[stopped];
        goOn();
    });
    document.addEventListener("visibilitychange", goOn);
    document.getElementById("dlocks-refresh").addEventListener("click", (event) => {
        event.preventDefault();
        parts.forEach(refresh);
    });
    parts.forEach((part) => later(part, part.section.dataset.every * 1000));
}
