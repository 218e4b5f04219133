/* Exchange the value of a field with the current one, which is in a <template>. */

"use strict";

{
    // Shows the buttons, which do nothing without this script.
    document.documentElement.classList.add("dlocks-scripts");

    // Django's filter_horizontal has a second list, of the options that are not chosen.
    const others = (field) =>
        window.SelectBox && field.multiple && field.id.endsWith("_to")
            ? document.getElementById(field.id.replace(/_to$/, "_from"))
            : null;

    const counterpart = (control) => {
        const fields = [...document.getElementsByName(control.name)];
        return /^(checkbox|radio)$/.test(control.type)
            ? fields.find((field) => field.value === control.value)
            : fields[0];
    };

    const stateOf = (field) => {
        if (/^(checkbox|radio)$/.test(field.type)) return field.checked;
        if (!field.options) return field.value;
        return [...field.options]
            .filter((option) => option.selected || others(field))
            .map((option) => ({ value: option.value, text: option.text }));
    };

    const setState = (field, state) => {
        if (typeof state === "boolean") {
            field.checked = state;
        } else if (typeof state === "string") {
            field.value = state;
        } else {
            setOptions(field, state);
        }
        for (const type of ["input", "change"]) {
            field.dispatchEvent(new Event(type, { bubbles: true }));
        }
    };

    const setOptions = (select, chosen) => {
        const isChosen = (option) => chosen.some(({ value }) => value === option.value);
        const other = others(select);
        if (other) {
            const moved = [...select.options].filter((option) => !isChosen(option));
            select.append(...[...other.options].filter(isChosen));
            other.append(...moved);
        }
        // A field with autocompletion has only the option of its own value.
        for (const { value, text } of chosen) {
            if (![...select.options].some((option) => option.value === value)) {
                select.append(new Option(text, value));
            }
        }
        for (const option of select.options) option.selected = isChosen(option);
        if (other) {
            for (const box of [select, other]) window.SelectBox.init(box.id);
            window.SelectFilter?.refresh_icons(select.id.replace(/_to$/, ""));
        }
    };

    document.addEventListener("click", (event) => {
        const button = event.target.closest?.("button.dlocks-take");
        if (!button) return;
        const { content } = button.parentElement.querySelector("template");
        const pairs = [...content.querySelectorAll("input, select, textarea")]
            .map((control) => [control, counterpart(control)])
            .filter(([, field]) => field);
        // Read all before the first is set, which changes the others of a group of radios.
        const states = pairs.map((pair) => pair.map(stateOf));
        pairs.forEach(([control, field], index) => {
            const [theirs, yours] = states[index];
            setState(control, yours);
            setState(field, theirs);
        });
        button.closest("tr").classList.toggle("dlocks-taken");
        const [text, undo] = [button.textContent, button.dataset.undo];
        button.textContent = undo;
        button.dataset.undo = text;
        button.setAttribute("aria-label", button.getAttribute("aria-label").replace(text, undo));
    });
}
